"""The real server: its own process, a real socket, real arithmetic; one engine for most tests, as a start takes
seconds.
"""

from __future__ import annotations

import asyncio
import json
import random
import socket
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.e2e.server_process import HANG_S, ServerProcess

HOT = {"max_new_tokens": 8, "temperature": 10, "seed": 7, "ignore_eos": True}
"""Greedy, this model repeats the last token of the prompt whatever its KV is; so hot, every page of it shows."""


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with ServerProcess("--max-total-tokens", "4096", "--page-size", "16", "--enable-metrics") as running:
        yield running


def ids(length: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(256) for _ in range(length)]


def test_the_start_is_summed_up(server: ServerProcess) -> None:
    head = "".join(server.output)
    assert "random:1: 3 layers, context 2048 tokens, compute float32" in head
    assert "4096 tokens in 256 pages of 16" in head
    assert "need 6 MiB (device 6 MiB, host 0 B), have" in head


def test_generate_text_ids_batches_and_streams_agree(server: ServerProcess) -> None:
    text = server.generate(text="a file of bytes", sampling_params=HOT)
    by_ids = server.generate(input_ids=list(b"a file of bytes"), sampling_params=HOT)
    batch = server.generate(text=["a file of bytes", "another"], sampling_params=HOT)
    assert text["output_ids"] == batch[0]["output_ids"]
    assert len(by_ids["output_ids"]) == len(batch[1]["output_ids"]) == 8
    with server.client.stream(
        "POST", "/generate", json={"text": "a file of bytes", "sampling_params": HOT, "stream": True}
    ) as response:
        lines = [line for line in response.iter_lines() if line]
    assert lines[-1] == "data: [DONE]"
    assert json.loads(lines[-2].removeprefix("data: "))["output_ids"] == text["output_ids"]


def test_a_second_turn_is_served_from_the_device(server: ServerProcess) -> None:
    server.flush()
    prompt = ids(200, 1)
    first = server.generate(input_ids=prompt, sampling_params=HOT)
    second = server.generate(input_ids=prompt, sampling_params=HOT)
    assert first["output_ids"] == second["output_ids"]
    assert first["meta_info"]["cached_tokens"] == 0
    assert second["meta_info"]["cached_tokens_details"] == {"device": 192, "host": 0, "storage": 0}
    server.assert_nothing_allocated()


def test_a_client_gone_in_mid_stream_leaves_nothing_allocated(server: ServerProcess) -> None:
    aborted = server.counters()["engine_aborted_total"]
    body = json.dumps({"input_ids": ids(40, 2), "sampling_params": {**HOT, "max_new_tokens": 2000}, "stream": True})
    head = f"POST /generate HTTP/1.1\r\nHost: test\r\nContent-Length: {len(body)}\r\n\r\n"
    address = httpx.URL(server.url)
    with socket.create_connection((address.host, address.port or 80), HANG_S) as connection:
        connection.sendall((head + body).encode())
        received = b""
        while b"data: " not in received:
            received += connection.recv(65536)
    server.assert_nothing_allocated()
    counters = server.counters()
    assert counters["engine_aborted_total"] == aborted + 1


def test_bad_input_is_refused_over_the_wire_and_the_server_lives(server: ServerProcess) -> None:
    bad: list[object] = [
        {"text": ""},
        {"input_ids": [5000]},
        {"input_ids": [1] * 3000},
        {"text": "x", "sampling_params": {"max_new_tokens": -1}},
        {"text": "x", "input_ids": [1]},
        {"text": 5},
        [],
    ]
    for body in bad:
        response = server.client.post("/generate", json=body)
        assert response.status_code == 400, body
        assert response.json()["error"]["message"]
    assert server.client.post("/generate", content=b"{").status_code == 400
    address = httpx.URL(server.url)
    with socket.create_connection((address.host, address.port or 80), HANG_S) as connection:
        connection.sendall(b"\x00\xff this is not HTTP\r\n\r\n")
        assert b"400" in connection.recv(65536)
    assert server.client.get("/health").status_code == 200


def test_a_body_beyond_the_limit_is_refused(server: ServerProcess) -> None:
    response = server.client.post("/generate", content=b'{"text": "' + b"x" * (17 << 20) + b'"}')
    assert response.status_code == 400
    assert "bytes" in response.json()["error"]["message"]


def test_hundreds_of_small_requests_get_the_same_tokens_as_alone(server: ServerProcess) -> None:
    rng = random.Random(3)
    prompts = [ids(rng.randrange(1, 60), seed % 40) for seed in range(400)]
    alone: dict[str, list[int]] = {}
    for prompt in prompts[:40]:
        alone[str(prompt)] = server.generate(input_ids=prompt, sampling_params=HOT)["output_ids"]
    server.flush()

    async def all_together() -> list[list[int]]:
        limits = httpx.Limits(max_connections=64)
        async with httpx.AsyncClient(base_url=server.url, timeout=HANG_S, limits=limits) as client:

            async def one(prompt: list[int]) -> list[int]:
                answer = await client.post("/generate", json={"input_ids": prompt, "sampling_params": HOT})
                assert answer.status_code == 200, answer.text
                output: list[int] = answer.json()["output_ids"]
                return output

            return await asyncio.gather(*(one(prompt) for prompt in prompts))

    together = asyncio.run(all_together())
    for prompt, output in zip(prompts, together, strict=True):
        assert alone.get(str(prompt), output) == output
    server.assert_nothing_allocated()


def test_metrics_count_what_happened(server: ServerProcess) -> None:
    server.generate(text="count me", sampling_params=HOT)
    text = server.client.get("/metrics").text
    assert 'sglang:cached_tokens_total{cache_source="device"}' in text
    assert "cachesvc_engine_forwards_total" in text


def test_chat_over_the_models_template(server: ServerProcess) -> None:
    body = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 4, "temperature": 0}
    answer = server.client.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    assert answer.json()["usage"]["completion_tokens"] <= 4


def test_sigterm_ends_the_server_with_status_0_in_the_middle_of_a_stream() -> None:
    with ServerProcess("--max-total-tokens", "4096", "--drain-timeout", "1") as running:
        body = {"input_ids": ids(40, 2), "sampling_params": {**HOT, "max_new_tokens": 1900}, "stream": True}
        with running.client.stream("POST", "/generate", json=body) as response:
            lines = response.iter_lines()
            next(lines)
            running.process.terminate()
            events = [line for line in lines if line]
        assert running.process.wait(HANG_S) == 0
    assert events[-1] == "data: [DONE]"
    finish = json.loads(events[-2].removeprefix("data: "))["meta_info"]["finish_reason"]
    assert finish == {"type": "abort", "message": "the server is shutting down", "status_code": 503}
    assert "Traceback" not in "".join(running.output)


def test_what_was_computed_before_a_restart_comes_from_storage(tmp_path: Path) -> None:
    flags = [
        *("--max-total-tokens", "1024", "--enable-hierarchical-cache", "--hicache-storage-backend", "file"),
        *("--hicache-storage-prefetch-policy", "wait_complete", "--hicache-storage-backend-extra-config"),
        json.dumps({"path": str(tmp_path / "pages"), "prefetch_threshold": 64}),
    ]
    prompt = ids(400, 9)
    with ServerProcess(*flags) as running:
        before = running.generate(input_ids=prompt, sampling_params=HOT)
        running.flush()
        flushed = running.generate(input_ids=prompt, sampling_params=HOT)
    with ServerProcess(*flags) as running:
        after = running.generate(input_ids=prompt, sampling_params=HOT)
        again = running.generate(input_ids=prompt, sampling_params=HOT)
        running.assert_nothing_allocated()
    assert before["output_ids"] == flushed["output_ids"] == after["output_ids"] == again["output_ids"]
    assert before["meta_info"]["cached_tokens"] == 0
    assert flushed["meta_info"]["cached_tokens_details"] == {"device": 0, "host": 0, "storage": 384}
    assert after["meta_info"]["cached_tokens_details"] == {"device": 0, "host": 0, "storage": 384}
    assert again["meta_info"]["cached_tokens_details"] == {"device": 384, "host": 0, "storage": 0}
