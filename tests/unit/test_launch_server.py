"""The process around the server: what cannot work is one line and a status, signals end it in order."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
from dataclasses import replace
from pathlib import Path

import pytest
import uvicorn

from cachesvc.client.private import TierDescription
from cachesvc.tcp import bind, url_of
from engine_plugin.engine.server import Stop, losses
from engine_plugin.launch_server import command, default_group
from tests.helpers.caches import IDENTITY

TINY = ("--model-path", "random:1", "--port", "0")


def test_a_port_in_use_is_named_before_anything_is_loaded(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert command(["--model-path", "/nowhere.gguf", "--port", str(port)]) == 1
    assert capsys.readouterr().err == (
        f"cachesvc engine: error: --port: cannot listen on 127.0.0.1:{port}: Address already in use; choose another "
        "port, 0 for any that is free\n"
    )


@pytest.mark.parametrize(
    ("flags", "status", "expected"),
    [
        (("--page-size", "0"), 2, "argument --page-size: must be at least 1, got 0"),
        (("--host", "no such host"), 1, "--host: cannot listen on no such host"),
        (("--host", "192.0.2.1"), 1, "--host: cannot listen on 192.0.2.1: Cannot assign requested address; name"),
        (("--model-path", "/nowhere.gguf"), 1, "'/nowhere.gguf'"),
        (("--model-path", "random:x"), 1, "'random:x'"),
        (("--model-path", "random:99999999999999999999999"), 1, "a whole number of at most 18 digits"),
        (("--host", "a" * 64), 1, "not a host name"),
        (("--max-total-tokens", str(10**12)), 1, "not enough memory: need"),
        (("--context-length", "1000000"), 1, "--context-length 1000000: the model was trained for 2048 tokens at most"),
        (("--enable-hierarchical-cache", "--hicache-size", "100000"), 1, "not enough memory: need"),
        (
            (
                *("--enable-hierarchical-cache", "--hicache-storage-backend", "file"),
                *("--hicache-storage-backend-extra-config", '{"pth": "/tmp"}'),
            ),
            2,
            "did you mean 'path'?",
        ),
    ],
)
def test_what_cannot_work_is_one_line_and_a_status(
    flags: tuple[str, ...], status: int, expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command([*TINY, *flags]) == status
    told = capsys.readouterr().err.strip().splitlines()
    last = told[-1]
    assert status == 1 or len(told) == 1
    assert last.startswith("cachesvc engine: error: ")
    assert expected in last


def test_the_default_group_is_the_same_for_the_same_pages_only() -> None:
    group = default_group("model", IDENTITY)
    assert group == default_group("model", replace(IDENTITY))
    assert group != default_group("model", replace(IDENTITY, page_size=8))
    assert group != default_group("model", replace(IDENTITY, weights_digest="r2"))
    assert group != default_group("other", IDENTITY)


@pytest.mark.parametrize("backend", ["file", "memory"])
def test_storage_without_room_for_a_page_is_refused_at_the_start(
    backend: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One page of the tiny model: 64 tokens of 3 layers, K and V, 2 heads of 32 float32 numbers, and a header."""
    page_bytes, header_bytes = 64 * 3 * 2 * 2 * 32 * 4, 4096
    options: dict[str, object] = {"capacity_bytes": page_bytes}
    if backend == "file":
        options["path"] = str(tmp_path)
    tiers = ("--enable-hierarchical-cache", "--hicache-storage-backend", backend, "--hicache-ratio", "1")
    flags = (*TINY, "--max-total-tokens", "64", *tiers, "--hicache-storage-backend-extra-config")
    assert command([*flags, json.dumps(options)]) == 2
    last = capsys.readouterr().err.strip().splitlines()[-1]
    assert last == (
        f"cachesvc engine: error: storage {backend}: 96 KiB are smaller than one page of {page_bytes} bytes with its "
        "header; raise capacity_bytes"
    )
    enough = TierDescription(backend, "", page_bytes + header_bytes, "", header_bytes, 4096)
    assert enough.has_room_for(page_bytes) and not enough.has_room_for(page_bytes + 1)
    assert replace(enough, capacity_bytes=0).has_room_for(page_bytes)


def test_pages_that_are_lost_are_not_put_down_to_the_time_where_it_is_not_over() -> None:
    assert losses(1, 10.0, is_time_over=False) == (
        "1 page worth keeping is not in storage: storage did not take all, or host memory had no room on the way"
    )
    assert losses(2, 10.0, is_time_over=True) == (
        "2 pages worth keeping are not in storage, and the drain time of 10 s is over (--drain-timeout)"
    )


def test_help_is_status_0(capsys: pytest.CaptureFixture[str]) -> None:
    assert command(["--help"]) == 0
    assert "--hicache-storage-prefetch-policy" in capsys.readouterr().out


def test_a_signal_before_there_is_a_server_ends_the_start() -> None:
    with pytest.raises(SystemExit) as ended:
        Stop()(signal.SIGTERM, None)
    assert ended.value.code == 0


def test_the_first_signal_ends_in_order_and_the_second_at_once() -> None:
    stop, server = Stop(), uvicorn.Server(uvicorn.Config(lambda: None))
    stop.server = server
    stop(signal.SIGTERM, None)
    assert (server.should_exit, server.force_exit) == (True, False)
    stop(signal.SIGTERM, None)
    assert server.force_exit


def test_signal_handlers_are_given_back() -> None:
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    stop = Stop()
    with stop.installed():
        assert signal.getsignal(signal.SIGTERM) is stop
        assert signal.getsignal(signal.SIGINT) is stop
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == before


def test_port_0_is_a_free_port_that_is_told() -> None:
    with bind("127.0.0.1", 0, "--") as bound:
        port = bound.getsockname()[1]
        assert url_of(bound) == f"http://127.0.0.1:{port}"
        assert port > 0


def test_an_answer_of_several_writes_does_not_wait_for_the_other_side() -> None:
    async def is_sent_at_once() -> bool:
        heard: asyncio.Future[bool] = asyncio.get_running_loop().create_future()

        def took(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            connection = writer.get_extra_info("socket")
            heard.set_result(bool(connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)))
            writer.close()

        bound = bind("127.0.0.1", 0, "--")
        async with await asyncio.start_server(took, sock=bound):
            _, writer = await asyncio.open_connection(*bound.getsockname())
            try:
                return await asyncio.wait_for(heard, 60)
            finally:
                writer.close()

    assert asyncio.run(is_sent_at_once())
