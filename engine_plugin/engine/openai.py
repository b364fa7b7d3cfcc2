"""OpenAI's /v1 endpoints over the same service: chat completions, completions, models. Text in, text out."""

from __future__ import annotations

import uuid
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from engine_plugin.engine.http import (
    EventStream,
    JsonResponse,
    ServerInfo,
    all_complete,
    merged,
    read_body,
    refuse_if_failed,
)
from engine_plugin.engine.json_fields import BadRequest, Fields, is_integer, parse_json, shown
from engine_plugin.engine.protocol import (
    UNLIMITED_TOKENS,
    Prompt,
    Task,
    check_count,
    scope_of,
    seed,
    stop_strings,
    stop_token_ids,
    temperature,
    token_ids,
    top_k,
    top_p,
)
from engine_plugin.engine.request import SamplingParams
from engine_plugin.engine.service import ChatMessage, EngineService, Generation

COMPLETION_TOKENS = 16
"""OpenAI's default length of /v1/completions; chat goes on as long as there is room."""

COMMON_FIELDS = frozenset(
    {
        "model",
        "max_tokens",
        "temperature",
        "top_p",
        "top_k",
        "stop",
        "stop_token_ids",
        "ignore_eos",
        "skip_special_tokens",
        "stream",
        "stream_options",
        "seed",
        "user",
        "rid",
        "cache_salt",
        "extra_key",
    }
)
NEUTRAL: Mapping[str, tuple[object, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "logit_bias": ({},),
    "response_format": ({"type": "text"},),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "parallel_tool_calls": (True, False),
    "store": (False,),
    "metadata": ({},),
    "service_tier": ("auto", "default"),
}
"""Fields that are accepted as null or with a value that asks for nothing."""


@dataclass(frozen=True, slots=True)
class CompletionCall:
    """A checked body."""

    tasks: list[Task]
    stream: bool
    include_usage: bool


@dataclass(frozen=True, slots=True)
class _Shape:
    """How the answers of one endpoint look: `answer(text)` whole, `piece(text, is_first)` in a stream."""

    id_prefix: str
    whole: str
    chunk: str
    answer: Callable[[str], dict[str, object]]
    piece: Callable[[str, bool], dict[str, object]]


CHAT = _Shape(
    "chatcmpl-",
    "chat.completion",
    "chat.completion.chunk",
    lambda text: {"message": {"role": "assistant", "content": text}},
    lambda text, is_first: {"delta": {"role": "assistant", "content": text} if is_first else {"content": text}},
)
COMPLETION = _Shape(
    "cmpl-", "text_completion", "text_completion", lambda text: {"text": text}, lambda text, is_first: {"text": text}
)


class OpenAIRoutes:
    """The handlers. `now` is wall-clock time in seconds, for `created`."""

    def __init__(self, service: EngineService, info: ServerInfo, now: Callable[[], float]) -> None:
        self._service = service
        self._info = info
        self._now = now

    def routes(self) -> list[Route]:
        """All of them."""
        return [
            Route("/v1/models", self.models, methods=["GET"]),
            Route("/v1/completions", self.completions, methods=["POST"]),
            Route("/v1/chat/completions", self.chat_completions, methods=["POST"]),
        ]

    async def models(self, request: Request) -> Response:
        """The one model there is."""
        model = {
            "id": self._info.served_model_name,
            "object": "model",
            "created": int(self._now()),
            "owned_by": "cachesvc",
            "root": self._info.model_path,
            "max_model_len": self._service.limits.context_tokens,
        }
        return JsonResponse({"object": "list", "data": [model]})

    async def completions(self, request: Request) -> Response:
        """Continue one prompt, or each of a list."""
        call = parse_completion(parse_json(await read_body(request)))
        return await self._answer(request, call, COMPLETION)

    async def chat_completions(self, request: Request) -> Response:
        """Answer the last message of a conversation."""
        messages, call_of = parse_chat(parse_json(await read_body(request)))
        prompt = await self._service.chat_prompt(messages)
        return await self._answer(request, call_of(prompt), CHAT)

    async def _answer(self, request: Request, call: CompletionCall, shape: _Shape) -> Response:
        generations = await self._service.start(call.tasks)
        head: dict[str, object] = {
            "id": shape.id_prefix + uuid.uuid4().hex,
            "created": int(self._now()),
            "model": self._info.served_model_name,
        }
        if call.stream:
            head["object"] = shape.chunk
            usage = self._usage if call.include_usage else None
            return EventStream(generations, _chunks(generations, shape, head, usage))
        await all_complete(request, generations)
        for generation in generations:
            refuse_if_failed(generation)
        choices = [
            {"index": number, **shape.answer(one.text), "logprobs": None, "finish_reason": _finish(one)}
            for number, one in enumerate(generations)
        ]
        return JsonResponse({**head, "object": shape.whole, "choices": choices, "usage": self._usage(generations)})

    def _usage(self, generations: Sequence[Generation]) -> dict[str, object]:
        prompt_tokens = sum(one.request.prompt_length for one in generations)
        output_tokens = sum(len(one.output_ids) for one in generations)
        cached_tokens = sum(one.request.cached.total for one in generations)
        usage: dict[str, object] = {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": output_tokens,
            "total_tokens": prompt_tokens + output_tokens,
        }
        if self._info.has_cache_report:
            usage["prompt_tokens_details"] = {"cached_tokens": cached_tokens}
        return usage


async def _chunks(
    generations: Sequence[Generation],
    shape: _Shape,
    head: Mapping[str, object],
    usage: Callable[[Sequence[Generation]], dict[str, object]] | None,
) -> AsyncGenerator[object, None]:
    sent = [-1] * len(generations)  # characters; -1: nothing yet, so the role is still to be sent
    async with aclosing(merged(generations)) as updates:
        async for number, generation in updates:
            text, is_first = generation.text[max(0, sent[number]) :], sent[number] < 0
            if not text and not is_first and generation.finish is None:
                continue
            sent[number] = len(generation.text)
            choice = {"index": number, **shape.piece(text, is_first), "logprobs": None}
            yield {**head, "choices": [{**choice, "finish_reason": _finish(generation)}]}
    if usage is not None:
        yield {**head, "choices": [], "usage": usage(generations)}


def _finish(generation: Generation) -> str | None:
    return None if generation.finish is None else generation.finish.type


def parse_completion(body: object) -> CompletionCall:
    """A body of /v1/completions. Raises BadRequest."""
    raw = Fields(body)
    raw.only(COMMON_FIELDS | {"prompt"}, NEUTRAL)
    return _call(raw, _prompts(raw), raw.integer("max_tokens", COMPLETION_TOKENS, least=0))


def parse_chat(body: object) -> tuple[list[ChatMessage], Callable[[Prompt], CompletionCall]]:
    """A body of /v1/chat/completions: the messages, and the call once they are a prompt. Raises BadRequest."""
    raw = Fields(body)
    raw.only(COMMON_FIELDS | {"messages", "max_completion_tokens"}, NEUTRAL)
    max_tokens = raw.integer("max_completion_tokens", None, least=0)
    if max_tokens is None:
        max_tokens = raw.integer("max_tokens", None, least=0)
    call = _call(raw, [Prompt("", None)], max_tokens)
    task = call.tasks[0]
    return _messages(raw), lambda prompt: replace(call, tasks=[replace(task, prompt=prompt)])


def _call(raw: Fields, prompts: list[Prompt], max_tokens: int | None) -> CompletionCall:
    rid = raw.string("rid")
    rids = [rid if rid is None or len(prompts) == 1 else f"{rid}_{number}" for number in range(len(prompts))]
    params, scope = _sampling(raw, max_tokens), scope_of(raw)
    options = Fields({} if raw.get("stream_options") is None else raw.get("stream_options"), "stream_options")
    options.only({"include_usage"}, {"continuous_usage_stats": (False,)})
    return CompletionCall(
        [Task(rid, prompt, params, max_tokens, scope) for rid, prompt in zip(rids, prompts, strict=True)],
        stream=raw.boolean("stream", False),
        include_usage=options.boolean("include_usage", False),
    )


def _sampling(raw: Fields, max_tokens: int | None) -> SamplingParams:
    default = SamplingParams()
    return SamplingParams(
        max_new_tokens=UNLIMITED_TOKENS if max_tokens is None else max_tokens,
        temperature=temperature(raw, default.temperature),
        top_p=top_p(raw, default.top_p),
        top_k=top_k(raw, default.top_k),
        stop=stop_strings(raw),
        stop_token_ids=stop_token_ids(raw),
        ignore_eos=raw.boolean("ignore_eos", default.ignore_eos),
        skip_special_tokens=raw.boolean("skip_special_tokens", default.skip_special_tokens),
        seed=seed(raw),
    )


def _prompts(raw: Fields) -> list[Prompt]:
    given = raw.get("prompt")
    if given is None or isinstance(given, dict | bool | int | float):
        raw.fail("prompt", "a string, a list of token ids, or a list of either")
    if isinstance(given, str) or (isinstance(given, list) and given and is_integer(given[0])):
        return [_prompt(given, "prompt")]
    assert isinstance(given, list)
    check_count("prompt", given)
    return [_prompt(one, f"prompt[{number}]") for number, one in enumerate(given)]


def _prompt(value: object, name: str) -> Prompt:
    return Prompt(value, None) if isinstance(value, str) else Prompt(None, token_ids(value, name))


def _messages(raw: Fields) -> list[ChatMessage]:
    given = raw.get("messages")
    if not isinstance(given, list) or not given:
        raw.fail("messages", "a non-empty list of {role, content}")
    return [_message(one, f"messages[{number}]") for number, one in enumerate(given)]


def _message(value: object, path: str) -> ChatMessage:
    raw = Fields(value, path)
    raw.only({"role", "content", "name"}, {"tool_calls": ([],), "refusal": ()})
    role, content = raw.string("role"), raw.get("content")
    if not role:
        raw.fail("role", "a non-empty string")
    if isinstance(content, list):
        return ChatMessage(role, "".join(_text_part(part, f"{path}.content") for part in content))
    if not isinstance(content, str):
        raw.fail("content", "a string or a list of text parts")
    return ChatMessage(role, content)


def _text_part(part: object, path: str) -> str:
    if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
        raise BadRequest(f'{path} must hold parts {{"type": "text", "text": string}}, got {shown(part)}')
    text: str = part["text"]
    return text
