"""OpenAI's endpoints over an engine whose model is an oracle."""

from __future__ import annotations

from typing import Any

from tests.oracles.token_model import expected_output
from tests.unit.serving import LETTERS, Server, events_of, run, text_of


def test_chat_and_completions_in_openais_shape() -> None:
    async def test(server: Server) -> None:
        messages = [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]
        chat = (await server.post("/v1/chat/completions", {"messages": messages, "max_tokens": 3})).json()
        expected = expected_output(LETTERS.encode("<user>hi"), 3)
        assert chat["object"] == "chat.completion"
        assert (chat["created"], chat["model"]) == (1234, "tiny")
        assert chat["choices"][0]["message"] == {"role": "assistant", "content": text_of(expected)}
        assert chat["choices"][0]["finish_reason"] == "length"
        assert chat["usage"] == {
            "prompt_tokens": 8,
            "completion_tokens": 3,
            "total_tokens": 11,
            "prompt_tokens_details": {"cached_tokens": 0},
        }
        body = {"prompt": ["ab", [1, 2]], "max_tokens": 2, "temperature": 0}
        completion = (await server.post("/v1/completions", body)).json()
        assert [choice["text"] for choice in completion["choices"]] == [
            text_of(expected_output(LETTERS.encode("ab"), 2)),
            text_of(expected_output([1, 2], 2)),
        ]
        long = (await server.post("/v1/chat/completions", {"messages": messages})).json()
        assert long["usage"]["total_tokens"] == 100
        assert (await server.client.get("/v1/models")).json()["data"][0]["id"] == "tiny"

    run(test)


def test_openai_streams_are_deltas() -> None:
    async def test(server: Server) -> None:
        body = {
            "messages": [{"role": "user", "content": "hi"}],
            "max_tokens": 4,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        events: Any = events_of((await server.post("/v1/chat/completions", body)).text)
        deltas = [event["choices"][0]["delta"] for event in events[:-1]]
        assert deltas[0]["role"] == "assistant"
        text = "".join(delta["content"] for delta in deltas)
        assert text == text_of(expected_output(LETTERS.encode("<user>hi"), 4))
        assert events[-2]["choices"][0]["finish_reason"] == "length"
        assert events[-1]["usage"]["completion_tokens"] == 4
        plain: Any = events_of(
            (await server.post("/v1/completions", {"prompt": "ab", "stream": True, "max_tokens": 2})).text
        )
        joined = "".join(event["choices"][0]["text"] for event in plain)
        assert joined == text_of(expected_output(LETTERS.encode("ab"), 2))

    run(test)


def test_bad_openai_bodies() -> None:
    cases: list[tuple[str, object, str]] = [
        ("/v1/chat/completions", {"messages": []}, "messages must be a non-empty list"),
        ("/v1/chat/completions", {"messages": [{"role": "user"}]}, "messages[0].content must be a string or a list"),
        ("/v1/chat/completions", {"messages": [{"content": "x"}]}, "messages[0].role must be a non-empty string"),
        ("/v1/chat/completions", {"messages": ["x"]}, "messages[0] must be a JSON object, got a string"),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            'messages[0].content must hold parts {"type": "text", "text": string}',
        ),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "assistant", "content": "x"}]},
            "messages: the last message must not be the assistant's",
        ),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], "n": 2}, "n is not supported, got 2"),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": "x"}], "tools": [{}]},
            "tools is not supported",
        ),
        ("/v1/completions", {}, "prompt must be a string, a list of token ids, or a list of either"),
        ("/v1/completions", {"prompt": []}, "prompt has 0 prompts"),
        ("/v1/completions", {"prompt": ["a", 3]}, "prompt[1] must be a list of token ids, got 3"),
        ("/v1/completions", {"prompt": "a", "max_tokens": -1}, "max_tokens must be a whole number of at least 0"),
        ("/v1/completions", {"prompt": "a", "stream_options": 4}, "stream_options must be a JSON object"),
    ]

    async def test(server: Server) -> None:
        for path, body, expected in cases:
            assert expected in await server.refused(body, path), body

    run(test)
