"""Tokenizers: there and back, streamed, from files of all sorts. (Against transformers: tests/e2e.)"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from engine_plugin.engine.detokenizer import TextStream
from engine_plugin.engine.loading import open_model
from engine_plugin.engine.tokenizer import Tokenizer, byte_tokenizer, folder_tokenizer, gguf_tokenizer
from engine_plugin.models.gguf_file import GgufFile
from tests.helpers.gguf_writer import write_gguf
from tests.helpers.texts import TEXTS, Message


@pytest.fixture(scope="module")
def ours() -> Tokenizer:
    tokenizer = open_model().tokenizer
    assert tokenizer is not None
    return tokenizer


@pytest.mark.parametrize("text", TEXTS)
def test_bytes_go_there_and_back(text: str) -> None:
    tokenizer = byte_tokenizer()
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids, skip_special_tokens=False) == text
    assert tokenizer.vocab_size == 259 and all(ids < 259)


@pytest.mark.parametrize("text", TEXTS)
def test_text_streamed_token_by_token_is_the_whole_text(ours: Tokenizer, text: str) -> None:
    for tokenizer in (ours, byte_tokenizer()):
        stream = TextStream(lambda ids, t=tokenizer: t.decode(ids, skip_special_tokens=False), [], [])
        pieces = []
        for token in tokenizer.encode(text):
            stream.push(int(token))
            pieces.append(stream.take(final=False))
        assert "".join([*pieces, stream.take(final=True)]) == text
        assert not any("\ufffd" in piece for piece in pieces)


def test_ids_nobody_knows_decode_to_nothing() -> None:
    assert byte_tokenizer().decode([1000, 65, 2**32 - 1]) == byte_tokenizer().decode([65])


def test_a_template_that_refuses_says_why(ours: Tokenizer) -> None:
    with pytest.raises(ValueError, match=r"the chat template does not take these messages: .*content"):
        ours.render_chat([{"role": "user"}])


# ---- files


def gguf(tmp_path: Path, **changes: object) -> GgufFile:
    fields: dict[str, object] = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": ["<s>", "a", "b", "ab", "</s>"],
        "tokenizer.ggml.token_type": [3, 1, 1, 1, 3],
        "tokenizer.ggml.merges": ["a b"],
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 4,
    }
    fields.update({f"tokenizer.{name.replace('__', '.')}": value for name, value in changes.items()})
    return GgufFile(write_gguf(tmp_path / "t.gguf", {k: v for k, v in fields.items() if v is not None}))


def test_a_model_that_wants_a_first_token_gets_it_once(tmp_path: Path) -> None:
    template = "{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}"
    tokenizer = gguf_tokenizer(gguf(tmp_path, ggml__add_bos_token=True, chat_template=template))
    assert tokenizer.encode("abb").tolist() == [0, 3, 2]
    assert tokenizer.encode_chat([Message("user", "abb")]).tolist() == [0, 3, 2]
    assert gguf_tokenizer(gguf(tmp_path)).encode("abb</s>").tolist() == [3, 2, 4]


def test_without_a_template_conversations_are_refused(tmp_path: Path) -> None:
    tokenizer = gguf_tokenizer(gguf(tmp_path))
    assert not tokenizer.has_chat_template and tokenizer.eos_token_ids == {4}
    with pytest.raises(ValueError, match="no chat template"):
        tokenizer.encode_chat([Message("user", "a")])


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"ggml__model": "llama"}, "tokenizer llama/gpt-2 is not supported, only gpt2/smollm, gpt2/gpt-2 are"),
        ({"ggml__pre": "qwen2"}, "tokenizer gpt2/qwen2 is not supported"),
        ({"ggml__tokens": None}, "field tokenizer.ggml.tokens is 'None'"),
        ({"ggml__merges": ["a b", "b c"]}, "the merge of 'b' and 'c' names no token"),
        ({"ggml__eos_token_id": "two"}, "field tokenizer.ggml.eos_token_id is 'two'"),
    ],
)
def test_tokenizers_that_are_not_known_are_refused(tmp_path: Path, changes: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        gguf_tokenizer(gguf(tmp_path, **changes))


def write_folder(folder: Path, **files: object) -> Path:
    fast = byte_tokenizer()._fast
    fast.save(str(folder / "tokenizer.json"))
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content), encoding="utf-8")
    return folder


def test_a_folder_in_hugging_face_layout(tmp_path: Path) -> None:
    assert folder_tokenizer(tmp_path) is None
    write_folder(
        tmp_path,
        tokenizer_config={
            "chat_template": [
                {"name": "tool_use", "template": "x"},
                {"name": "default", "template": "{{ messages|length }}"},
            ],
            "eos_token": {"content": "<|im_end|>"},
            "bos_token": "<|endoftext|>",
            "add_bos_token": True,
        },
    )
    tokenizer = folder_tokenizer(tmp_path)
    assert tokenizer is not None
    assert tokenizer.encode("A").tolist()[0] == 256 and tokenizer.eos_token_ids == {258}
    assert tokenizer.render_chat([{}, {}]) == "2"
    write_folder(tmp_path, generation_config={"eos_token_id": [256, 258]})
    (tmp_path / "chat_template.jinja").write_text("{{ raise_exception('not today') }}", encoding="utf-8")
    tokenizer = folder_tokenizer(tmp_path)
    assert tokenizer is not None and tokenizer.eos_token_ids == {256, 258}
    with pytest.raises(ValueError, match="not today"):
        tokenizer.render_chat([])


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
def test_a_broken_file_is_named(tmp_path: Path, name: str) -> None:
    write_folder(tmp_path)
    (tmp_path / name).write_text("{", encoding="utf-8")
    with pytest.raises(ValueError, match=name):
        folder_tokenizer(tmp_path)
