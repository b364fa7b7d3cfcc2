"""Whatever a client sends: an answer that says what was wrong and what is expected, and a server that lives."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine_plugin.engine import http
from engine_plugin.engine.json_fields import BadRequest
from engine_plugin.engine.openai import parse_chat, parse_completion
from engine_plugin.engine.protocol import parse_generate
from tests.oracles.token_model import VOCAB, expected_output
from tests.unit.serving import PROMPT, Server, run


def sampling(**params: object) -> dict[str, object]:
    return {"input_ids": [1], "sampling_params": params}


BAD_BODIES: list[tuple[object, str]] = [
    (b"{", "the body is not JSON"),
    (b'{"text": NaN}', "NaN is no number in JSON"),
    (b"\xff\xfe", "the body is not JSON"),
    (b"[" * 100_000, "nested too deep"),
    (b'{"input_ids": [' + b"9" * 5000 + b"]}", "a number has too many digits"),
    ([1, 2], "the body must be a JSON object, got a list"),
    ({}, "exactly one of text and input_ids is expected, got none"),
    ({"text": "a", "input_ids": [1]}, "exactly one of text and input_ids is expected, got both"),
    ({"text": ""}, "the prompt is empty"),
    ({"text": 7}, "text must be a string or a list of strings, got 7"),
    ({"text": []}, "text has 0 prompts: from 1 to 1024 expected"),
    ({"text": ["a", 1]}, "text must be a string or a list of strings"),
    ({"text": "\ud800"}, "text is not Unicode"),
    ({"input_ids": []}, "the prompt is empty"),
    ({"input_ids": [[1], []]}, "the prompt is empty"),
    ({"input_ids": "abc"}, 'input_ids must be a list of token ids, got "abc"'),
    ({"input_ids": [1, 2.5]}, "input_ids must be a list of token ids"),
    ({"input_ids": [1, True]}, "input_ids must be a list of token ids"),
    ({"input_ids": [[1], "x"]}, 'input_ids[1] must be a list of token ids, got "x"'),
    ({"input_ids": [1, -1]}, "input_ids has -1: token ids are in [0, vocabulary size)"),
    ({"input_ids": [1, 2**40]}, "token ids are in [0, vocabulary size)"),
    ({"input_ids": [1, VOCAB]}, f"token id {VOCAB} is out of range: ids are in [0, {VOCAB})"),
    ({"input_ids": [1] * 100}, "the prompt has 100 tokens: at most 99 fit"),
    ({"input_ids": [1], "sampling_params": 3}, "sampling_params must be a JSON object, got a number"),
    ({"input_ids": [1], "sampling_params": [{}]}, "sampling_params has 1 entries for 1 prompt(s), no batch"),
    ({"input_ids": [[1], [2]], "sampling_params": [{}]}, "sampling_params has 1 entries for 2 prompt(s)"),
    (sampling(max_new_tokens=-1), "max_new_tokens must be a whole number of at least 0"),
    (sampling(max_new_tokens="5"), 'max_new_tokens must be a whole number of at least 0, got "5"'),
    (sampling(max_new_tokens=True), "max_new_tokens must be a whole number"),
    (sampling(max_new_tokens=100), "after a prompt of 1 tokens at most 99 fit into 100"),
    (sampling(temperature=-0.5), "temperature must be a number of at least 0, got -0.5"),
    (sampling(top_p=0), "top_p must be a number in (0, 1], got 0"),
    (sampling(top_p=1e999), "not JSON"),
    (sampling(top_k=0), "top_k must be a whole number of at least 1, or -1"),
    (sampling(stop=[""]), "stop must be a string of 1 to 1024 characters"),
    (sampling(stop="x" * 1025), "stop must be a string of 1 to 1024 characters"),
    ({"input_ids": [1], "rid": "x" * 513}, "rid must be a string of 1 to 512 characters"),
    (sampling(stop=["x"] * 17), "a list of at most 16"),
    (sampling(stop_token_ids=[-4]), "sampling_params.stop_token_ids has -4"),
    (sampling(seed=2**64), "seed must be a whole number of at least 0"),
    (sampling(ignore_eos=1), "ignore_eos must be true or false, got 1"),
    (sampling(max_new_token=1), "unknown field sampling_params.max_new_token (did you mean max_new_tokens?)"),
    (sampling(n=2), "sampling_params.n is not supported, got 2"),
    ({"input_ids": [1], "return_logprob": True}, "return_logprob is not supported, got true"),
    ({"input_ids": [1], "strem": True}, "unknown field strem (did you mean stream?)"),
    ({"input_ids": [1], "stream": "yes"}, 'stream must be true or false, got "yes"'),
    ({"input_ids": [1], "rid": 5}, "rid must be a string of 1 to 512 characters"),
    ({"input_ids": [[1], [2]], "rid": ["a", "a"]}, "rid 'a' is in use"),
    ({"input_ids": [1], "cache_salt": 5}, "cache_salt must be a string, got 5"),
]


def test_bad_input_is_answered_with_what_was_expected_and_the_server_lives() -> None:
    async def test(server: Server) -> None:
        for body, expected in BAD_BODIES:
            message = await server.refused(body)
            assert expected in message, (body, message)
        answer: Any = await server.generate(input_ids=PROMPT, sampling_params={"max_new_tokens": 2})
        assert answer["output_ids"] == expected_output(PROMPT, 2)
        await server.assert_nothing_held()

    run(test)


def test_a_body_that_is_too_large_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "MAX_BODY_BYTES", 1000)

    async def test(server: Server) -> None:
        assert "more than 1000 bytes" in await server.refused(json.dumps({"text": "x" * 1000}).encode())
        await server.generate(input_ids=PROMPT, sampling_params={"max_new_tokens": 1})

    run(test)


def test_an_endless_body_is_not_read_to_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "MAX_BODY_BYTES", 1000)
    monkeypatch.setattr(http, "MAX_DISCARDED_BYTES", 2000)
    num_sent = 0

    async def body() -> AsyncIterator[bytes]:
        nonlocal num_sent
        for _ in range(10_000):
            num_sent += 100
            yield b"x" * 100

    async def test(server: Server) -> None:
        response = await server.client.post("/generate", content=body())
        assert response.status_code == 400
        assert num_sent < 4000

    run(test)


FIELD_NAMES = sorted(
    {"text", "input_ids", "sampling_params", "stream", "rid", "cache_salt", "extra_key", "return_logprob"}
    | {"prompt", "messages", "role", "content", "type", "max_tokens", "stop", "n", "tools", "stream_options"}
    | {"max_new_tokens", "temperature", "top_p", "top_k", "stop_token_ids", "seed", "ignore_eos", "include_usage"}
)
LEAVES = st.none() | st.booleans() | st.integers(-5, 2**70) | st.floats() | st.text(max_size=3) | st.just("text")
VALUES = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(FIELD_NAMES), inner, max_size=4),
    max_leaves=8,
)


@settings(max_examples=400, deadline=None)
@given(st.dictionaries(st.sampled_from(FIELD_NAMES), VALUES, max_size=5))
def test_any_json_is_taken_or_refused_with_a_reason(body: dict[str, object]) -> None:
    for parse in (parse_generate, parse_completion, parse_chat):
        try:
            parse(body)
        except BadRequest as error:
            assert str(error)
