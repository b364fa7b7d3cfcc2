"""What may be asked of /generate, in SGLang's shape. No I/O; every complaint is a BadRequest."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

from cachesvc.identity import scope_digest
from engine_plugin.engine.json_fields import BadRequest, Fields, is_integer, shown
from engine_plugin.engine.request import SamplingParams
from engine_plugin.hicache.base import NO_SCOPE

MAX_PROMPTS = 1024
MAX_STOP_STRINGS = 16
MAX_STOP_LENGTH = 1024
"""Characters; the work per token grows with it."""

MAX_RID_LENGTH = 512
MAX_SEED = 2**63
UNLIMITED_TOKENS = 2**31
"""As many output tokens as there is room for."""

NEUTRAL_FIELDS: Mapping[str, tuple[object, ...]] = {
    "return_logprob": (False,),
    "logprob_start_len": (-1,),
    "top_logprobs_num": (0,),
    "token_ids_logprob": (),
    "return_text_in_logprobs": (False, True),
    "return_hidden_states": (False,),
    "input_embeds": (),
    "image_data": ([],),
    "video_data": ([],),
    "audio_data": ([],),
    "lora_path": (),
    "session_params": (),
    "custom_logit_processor": (),
    "priority": (0,),
    "log_metrics": (True, False),
}
"""Fields of SGLang's /generate that are accepted as null or with a value that asks for nothing."""

NEUTRAL_SAMPLING: Mapping[str, tuple[object, ...]] = {
    "n": (1,),
    "min_p": (0,),
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "repetition_penalty": (1,),
    "min_new_tokens": (0,),
    "json_schema": (),
    "regex": (),
    "ebnf": (),
    "structural_tag": (),
    "stop_regex": (),
    "logit_bias": ({},),
    "custom_params": (),
    "no_stop_trim": (False,),
    "spaces_between_special_tokens": (True,),
}


@dataclass(frozen=True, slots=True)
class Prompt:
    """Text to be tokenized, or token ids as uint32 [n]; exactly one of the two."""

    text: str | None
    ids: NDArray[np.uint32] | None


@dataclass(frozen=True, slots=True)
class Task:
    """One prompt and all that is needed to run it. `max_new_tokens` None: as many as `params` says and as fit."""

    rid: str | None
    prompt: Prompt
    params: SamplingParams
    max_new_tokens: int | None
    scope: bytes = NO_SCOPE


@dataclass(frozen=True, slots=True)
class GenerateCall:
    """A checked body of /generate. `is_batch`: the answer is a list even for one task."""

    tasks: list[Task]
    is_batch: bool
    stream: bool


def parse_generate(body: object) -> GenerateCall:
    """A body of /generate."""
    raw = Fields(body)
    raw.only({"text", "input_ids", "sampling_params", "stream", "rid", "cache_salt", "extra_key"}, NEUTRAL_FIELDS)
    prompts, is_batch = _prompts(raw)
    params = _per_prompt(raw, "sampling_params", len(prompts), is_batch)
    rids = _rids(raw, len(prompts), is_batch)
    scope = scope_of(raw)
    tasks = []
    for prompt, one, rid in zip(prompts, params, rids, strict=True):
        sampling, max_new_tokens = parse_sampling(one)
        tasks.append(Task(rid, prompt, sampling, max_new_tokens, scope))
    return GenerateCall(tasks, is_batch, raw.boolean("stream", False))


def parse_sampling(body: object) -> tuple[SamplingParams, int | None]:
    """SGLang's `sampling_params`, and its max_new_tokens as given (None: not given)."""
    raw = Fields({} if body is None else body, "sampling_params")
    raw.only({one.name for one in fields(SamplingParams)} | {"sampling_seed"}, NEUTRAL_SAMPLING)
    default = SamplingParams()
    max_new_tokens = raw.integer("max_new_tokens", None, least=0)
    params = SamplingParams(
        max_new_tokens=default.max_new_tokens if max_new_tokens is None else max_new_tokens,
        temperature=temperature(raw, default.temperature),
        top_p=top_p(raw, default.top_p),
        top_k=top_k(raw, default.top_k),
        stop=stop_strings(raw),
        stop_token_ids=stop_token_ids(raw),
        ignore_eos=raw.boolean("ignore_eos", default.ignore_eos),
        skip_special_tokens=raw.boolean("skip_special_tokens", default.skip_special_tokens),
        seed=seed(raw),
    )
    return params, max_new_tokens


def seed(raw: Fields) -> int | None:
    """`seed`, or `sampling_seed` as SGLang calls it."""
    value = raw.integer("seed", None, least=0, most=MAX_SEED - 1)
    return value if value is not None else raw.integer("sampling_seed", None, least=0, most=MAX_SEED - 1)


def temperature(raw: Fields, default: float) -> float:
    """A number >= 0; 0 is greedy."""
    return raw.number("temperature", default, expected="a number of at least 0", valid=lambda value: value >= 0)


def top_p(raw: Fields, default: float) -> float:
    """A number in (0, 1]."""
    return raw.number("top_p", default, expected="a number in (0, 1]", valid=lambda value: 0 < value <= 1)


def stop_strings(raw: Fields) -> tuple[str, ...]:
    """`stop`: one string or a short list of them, none empty."""
    value = raw.get("stop")
    stop = [value] if isinstance(value, str) else value
    if stop is None:
        return ()
    if not isinstance(stop, list) or len(stop) > MAX_STOP_STRINGS or not all(map(_is_stop_string, stop)):
        raw.fail("stop", f"a string of 1 to {MAX_STOP_LENGTH} characters or a list of at most {MAX_STOP_STRINGS}")
    return tuple(stop)


def token_ids(value: object, name: str) -> NDArray[np.uint32]:
    """A JSON list of token ids. Whether the vocabulary has them is checked where the vocabulary is known."""
    if not isinstance(value, list) or not all(is_integer(one) for one in value):
        raise BadRequest(f"{name} must be a list of token ids, got {shown(value)}")
    if value and not (min(value) >= 0 and max(value) < 2**32):
        bad = next(one for one in value if not 0 <= one < 2**32)
        raise BadRequest(f"{name} has {bad}: token ids are in [0, vocabulary size)")
    return np.array(value, np.uint32)


def _is_stop_string(value: object) -> bool:
    return isinstance(value, str) and 0 < len(value) <= MAX_STOP_LENGTH


def _prompts(raw: Fields) -> tuple[list[Prompt], bool]:
    text, ids = raw.get("text"), raw.get("input_ids")
    if (text is None) == (ids is None):
        given = "both" if text is not None else "none"
        raise BadRequest(f"exactly one of text and input_ids is expected, got {given}")
    if text is not None:
        return _text_prompts(raw, text)
    is_batch = isinstance(ids, list) and bool(ids) and isinstance(ids[0], list)
    lists = ids if is_batch else [ids]
    assert isinstance(lists, list)
    check_count("input_ids", lists)
    names = [f"input_ids[{number}]" if is_batch else "input_ids" for number in range(len(lists))]
    return [Prompt(None, token_ids(one, name)) for one, name in zip(lists, names, strict=True)], is_batch


def _text_prompts(raw: Fields, text: object) -> tuple[list[Prompt], bool]:
    is_batch = isinstance(text, list)
    texts = text if isinstance(text, list) else [text]
    check_count("text", texts)
    strings = [one for one in texts if isinstance(one, str)]
    if len(strings) != len(texts):
        raw.fail("text", "a string or a list of strings")
    return [Prompt(one, None) for one in strings], is_batch


def check_count(name: str, prompts: list[object]) -> None:
    """Refuse a batch of none or of too many."""
    if not 1 <= len(prompts) <= MAX_PROMPTS:
        raise BadRequest(f"{name} has {len(prompts)} prompts: from 1 to {MAX_PROMPTS} expected")


def _per_prompt(raw: Fields, name: str, count: int, is_batch: bool) -> list[object]:
    """One value for all prompts, or a list with one for each."""
    value = raw.get(name)
    if not isinstance(value, list):
        return [value] * count
    if not is_batch or len(value) != count:
        raise BadRequest(f"{name} has {len(value)} entries for {count} prompt(s)" + ("" if is_batch else ", no batch"))
    return value


def _rids(raw: Fields, count: int, is_batch: bool) -> list[str | None]:
    given = _per_prompt(raw, "rid", count, is_batch)
    if not all(one is None or (isinstance(one, str) and 0 < len(one) <= MAX_RID_LENGTH) for one in given):
        raw.fail("rid", f"a string of 1 to {MAX_RID_LENGTH} characters or a list of them")
    rids = [one if isinstance(one, str) else None for one in given]
    if is_batch and isinstance(raw.get("rid"), str):
        return [f"{rid}_{number}" for number, rid in enumerate(rids)]
    return rids


def scope_of(raw: Fields) -> bytes:
    """The digest of `cache_salt` and `extra_key`: requests that differ in either share no cached prefix."""
    salt, extra_key = raw.string("cache_salt"), raw.string("extra_key")
    if not salt and not extra_key:
        return NO_SCOPE
    return scope_digest(salt=json.dumps([salt, extra_key]))


def top_k(raw: Fields, default: int) -> int:
    """A whole number >= 1, or -1 for all."""
    value = raw.integer("top_k", default, least=-1)
    if value == 0:
        raw.fail("top_k", "a whole number of at least 1, or -1 for the whole vocabulary")
    return value


def stop_token_ids(raw: Fields) -> frozenset[int]:
    """A list of token ids."""
    value = raw.get("stop_token_ids")
    if value is None:
        return frozenset()
    return frozenset(token_ids(value, raw.path("stop_token_ids")).tolist())
