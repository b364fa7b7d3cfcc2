"""Text to token ids and back, conversations to prompts: from a GGUF file, from tokenizer.json, or of plain bytes."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as FastTokenizer

from engine_plugin.models.gguf_file import GgufFile, Value

U32 = NDArray[np.uint32]

CONTROL, USER_DEFINED = 3, 4
"""GGUF token types that are found in text as they stand; control tokens are dropped from output on demand."""

BYTE_CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


class ChatMessage(Protocol):
    """One message of a conversation; `role` is what the model's template knows: system, user, assistant, ..."""

    @property
    def role(self) -> str:
        """Who speaks."""

    @property
    def content(self) -> str:
        """What is said."""


@dataclass(frozen=True)
class SpecialTokens:
    """`bos_id` None: prompts begin with no token of their own."""

    bos_id: int | None
    eos_ids: frozenset[int]
    chat_template: str | None


class Tokenizer:
    """Thread safe. Special tokens that stand in a text become their ids, as in Hugging Face tokenizers."""

    def __init__(self, fast: FastTokenizer, special: SpecialTokens) -> None:
        self._fast = fast
        self._special = special
        self._template = None if special.chat_template is None else _compiled(special.chat_template)

    @property
    def vocab_size(self) -> int:
        """Token ids lie in [0, vocab_size)."""
        return int(self._fast.get_vocab_size(with_added_tokens=True))

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """A model ends its answer with one of these."""
        return self._special.eos_ids

    @property
    def has_chat_template(self) -> bool:
        """Whether conversations can be rendered."""
        return self._template is not None

    def encode(self, text: str) -> U32:
        """Ids [n] of a prompt, with the token that begins prompts if the model has one."""
        begin = [] if self._special.bos_id is None else [self._special.bos_id]
        return np.array(begin + self._fast.encode(text, add_special_tokens=False).ids, np.uint32)

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of any run of ids. Bytes that are no whole character come out as U+FFFD; unknown ids as nothing."""
        return str(self._fast.decode(list(map(int, ids)), skip_special_tokens=skip_special_tokens))

    def render_chat(self, messages: Sequence[Mapping[str, object]], *, add_generation_prompt: bool = True) -> str:
        """The conversation as the model was trained to read it. With `add_generation_prompt` up to where the assistant
        begins to speak. Raises ValueError when the model has no template or the template refuses the messages."""
        from jinja2 import TemplateError

        if self._template is None:
            raise ValueError("this model has no chat template: send text or input_ids")
        bos = "" if self._special.bos_id is None else self._fast.id_to_token(self._special.bos_id)
        try:
            return str(
                self._template.render(messages=messages, add_generation_prompt=add_generation_prompt, bos_token=bos)
            )
        except TemplateError as error:
            raise ValueError(f"the chat template does not take these messages: {error}") from error

    def encode_chat(self, messages: Sequence[ChatMessage], *, add_generation_prompt: bool = True) -> U32:
        """Ids [n] of the rendered conversation; a template writes the token that begins prompts itself."""
        plain = [{"role": message.role, "content": message.content} for message in messages]
        text = self.render_chat(plain, add_generation_prompt=add_generation_prompt)
        return np.array(self._fast.encode(text, add_special_tokens=False).ids, np.uint32)


def gguf_tokenizer(file: GgufFile) -> Tokenizer:
    """The byte-level BPE tokenizer inside a GGUF file. Raises ValueError naming the kinds that are known."""
    fields = _Fields(file)
    kind, splitter = fields.text("tokenizer.ggml.model"), fields.text("tokenizer.ggml.pre")
    split = {"smollm": _split_digits_and_words, "gpt-2": _split_words}
    if kind != "gpt2" or splitter not in split:
        raise ValueError(
            f"{file.path}: tokenizer {kind}/{splitter} is not supported, only gpt2/{', gpt2/'.join(split)} are; "
            "a folder with tokenizer.json may hold any kind"
        )
    tokens = [str(token) for token in fields.array("tokenizer.ggml.tokens")]
    merges = [_pair(str(merge)) for merge in fields.array("tokenizer.ggml.merges")]
    vocab = {token: index for index, token in enumerate(tokens)}
    for left, right in merges:  # the library panics
        if left + right not in vocab or left not in vocab or right not in vocab:
            raise ValueError(f"{file.path}: the merge of {left!r} and {right!r} names no token")
    fast = FastTokenizer(models.BPE(vocab=vocab, merges=merges))
    fast.pre_tokenizer = split[splitter]()
    fast.decoder = decoders.ByteLevel()
    kinds = fields.array("tokenizer.ggml.token_type")
    fast.add_special_tokens([_added(t) for t, kind in zip(tokens, kinds, strict=True) if kind == CONTROL])
    fast.add_tokens([_added(t) for t, kind in zip(tokens, kinds, strict=True) if kind == USER_DEFINED])
    ends = (fields.number("tokenizer.ggml.eos_token_id"), fields.number("tokenizer.ggml.eot_token_id"))
    template = file.metadata.get("tokenizer.chat_template")
    special = SpecialTokens(
        bos_id=fields.number("tokenizer.ggml.bos_token_id") if fields.is_set("tokenizer.ggml.add_bos_token") else None,
        eos_ids=frozenset(end for end in ends if end is not None),
        chat_template=None if template is None else str(template),
    )
    return Tokenizer(fast, special)


def folder_tokenizer(folder: Path) -> Tokenizer | None:
    """The tokenizer of a folder in Hugging Face's layout; None where there is no tokenizer.json.

    Raises ValueError naming the file that is broken.
    """
    if not (folder / "tokenizer.json").is_file():
        return None
    try:
        fast = FastTokenizer.from_file(str(folder / "tokenizer.json"))
    except Exception as error:  # the library raises plain Exception
        raise ValueError(f"{folder / 'tokenizer.json'}: {error}") from error
    config = _json(folder / "tokenizer_config.json")
    template_file = folder / "chat_template.jinja"
    template = template_file.read_text(encoding="utf-8") if template_file.is_file() else config.get("chat_template")
    if isinstance(template, list):  # several templates by name
        template = next((one["template"] for one in template if one["name"] == "default"), None)
    bos = _token_text(config.get("bos_token")) if config.get("add_bos_token") else None
    eos = _token_text(config.get("eos_token"))
    ends = _json(folder / "generation_config.json").get("eos_token_id", fast.token_to_id(eos) if eos else None)
    special = SpecialTokens(
        bos_id=fast.token_to_id(bos) if bos else None,
        eos_ids=frozenset(ends if isinstance(ends, list) else [] if ends is None else [ends]),
        chat_template=template,
    )
    return Tokenizer(fast, special)


def byte_tokenizer() -> Tokenizer:
    """One token for each byte, then <|endoftext|>, <|im_start|>, <|im_end|>: for models with random weights."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    fast = FastTokenizer(models.BPE(vocab={letter: index for index, letter in enumerate(alphabet)}, merges=[]))
    fast.pre_tokenizer = _split_words()
    fast.decoder = decoders.ByteLevel()
    special = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
    fast.add_special_tokens([_added(token) for token in special])
    return Tokenizer(fast, SpecialTokens(None, frozenset({len(alphabet) + 2}), BYTE_CHAT_TEMPLATE))


class _Fields:
    """GGUF metadata with the types a tokenizer expects; ValueError otherwise."""

    def __init__(self, file: GgufFile) -> None:
        self._file = file

    def text(self, name: str) -> str:
        value = self._file.metadata.get(name, "missing")
        return value if isinstance(value, str) else self._refuse(name, value)

    def array(self, name: str) -> list[Any]:
        value = self._file.metadata.get(name)
        return value if isinstance(value, list) else self._refuse(name, value)

    def number(self, name: str) -> int | None:
        value = self._file.metadata.get(name)
        return value if value is None or isinstance(value, int) else self._refuse(name, value)

    def is_set(self, name: str) -> bool:
        return self._file.metadata.get(name) is True

    def _refuse(self, name: str, value: Value | None) -> Any:
        raise ValueError(f"{self._file.path}: field {name} is {str(value)[:80]!r}")


def _split_words() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)


def _split_digits_and_words() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _split_words()])


def _pair(merge: str) -> tuple[str, str]:
    left, _, right = merge.partition(" ")
    return left, right


def _added(token: str) -> AddedToken:
    return AddedToken(token, normalized=False)


def _token_text(token: object) -> str | None:
    return token["content"] if isinstance(token, dict) else token if isinstance(token, str) else None


def _json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        parsed = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: cannot be read: {error}") from error
    if not isinstance(parsed, dict):
        raise ValueError(f"{path}: expected an object")
    return parsed


def _compiled(template: str) -> Any:
    """Sandboxed, with what Hugging Face templates rely on: stripped blocks, raise_exception, tojson."""
    from jinja2 import TemplateError
    from jinja2.ext import loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    def raise_exception(message: str) -> None:
        raise TemplateError(message)

    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
    environment.globals["raise_exception"] = raise_exception
    environment.filters["tojson"] = lambda value, indent=None: json.dumps(value, ensure_ascii=False, indent=indent)
    return environment.from_string(template)
