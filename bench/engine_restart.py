"""How soon a restarted engine serves from the pages that the daemon has kept for it.

engine.restart_first_hit: an engine with 1 GB of host memory is killed; another one with the same flags is composed
(model, pool, attach, take-over of the region) and answers a prompt whose prefix is on host. Its reference is the same
engine without the tiers below the device, composed only: the engine's own start. Imports are in neither. Tiny model.
"""

from __future__ import annotations

import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from bench.harness import Measurement, Run, figure
from engine_plugin.engine.args import parse_args
from engine_plugin.engine.detokenizer import NoText
from engine_plugin.engine.request import Request, SamplingParams
from engine_plugin.hicache.base import CachedTokens
from engine_plugin.launch_server import Engine, compose

ROUNDS = 3
PAGE_SIZE = 64
PREFIX_TOKENS = 1920
HOST_GB = "1.0"
HANG_S = 60.0
RESOLUTION_S = 0.001
"""Two starts differ by more than this for other reasons; less, or less than nothing, says no more."""
OWN = ("--model-path", "random:1", "--page-size", str(PAGE_SIZE), "--max-total-tokens", "4096")
DAEMON = "import sys; from cachesvc.cli import main; sys.exit(main(sys.argv[1:]))"


def flags(socket: str) -> list[str]:
    """Of the engine that is restarted."""
    options = json.dumps({"prefetch_threshold": PAGE_SIZE})
    return [
        *(*OWN, "--enable-hierarchical-cache", "--hicache-size", HOST_GB, "--cachesvc-address", f"unix://{socket}"),
        *("--hicache-storage-backend-extra-config", options),
    ]


def first_token(engine: Engine) -> CachedTokens:
    """Answers the prompt; where its prefix came from."""
    tokens = np.random.default_rng(1).integers(0, 256, PREFIX_TOKENS + 1).astype(np.uint32)
    params = SamplingParams(max_new_tokens=1, temperature=0.0, ignore_eos=True)
    request = Request("1", 1, tokens, params, NoText(), arrived_s=time.perf_counter())
    scheduler = engine.scheduler
    scheduler.add(request)
    deadline_s = time.monotonic() + HANG_S
    while scheduler.has_requests:
        assert time.monotonic() < deadline_s, "the prompt is not answered"
        scheduler.step()
    scheduler.take_progress()
    return request.cached


@contextmanager
def daemon(folder: Path) -> Iterator[str]:
    """`cachesvc up`; its socket."""
    socket = folder / "node.sock"
    options = ["--channel.socket", str(socket), "--admin.enabled", "false"]
    environment = {"XDG_CACHE_HOME": str(folder)}
    with _python(["-c", DAEMON, "up", *options], environment) as process:
        _wait_for(process, "ready")
        yield str(socket)


@contextmanager
def _python(arguments: list[str], environment: dict[str, str] | None = None) -> Iterator[subprocess.Popen[str]]:
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), **(environment or {})}
    process = subprocess.Popen(
        [sys.executable, *arguments], env=env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True
    )
    try:
        yield process
    finally:
        process.terminate()
        process.wait(HANG_S)
        assert process.stdout is not None
        process.stdout.close()


def _wait_for(process: subprocess.Popen[str], word: str) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        if line.split()[:1] == [word]:
            return
    raise AssertionError(f"the process ended without saying {word!r}")


def _kill_an_engine(socket: str) -> None:
    """One that has the prompt on host, and dies."""
    with _python(["-m", "bench.engine_restart", socket]) as process:
        _wait_for(process, "computed")
        process.kill()


@figure("engine.restart_first_hit", unit="s", target="value<=1")
def restart_first_hit(run: Run) -> Measurement:
    beyond: list[float] = []
    own: list[float] = []
    with tempfile.TemporaryDirectory(prefix="cs") as folder, daemon(Path(folder)) as socket:
        for _ in range(ROUNDS):
            _kill_an_engine(socket)
            begin_s = run.clock()
            compose(parse_args(list(OWN))).cache.shutdown(0.0)
            own.append(run.clock() - begin_s)
            begin_s = run.clock()
            engine = compose(parse_args(flags(socket)))
            try:
                cached = first_token(engine)
                beyond.append(max(RESOLUTION_S, run.clock() - begin_s - own[-1]))
                assert cached.host == PREFIX_TOKENS, f"{cached} of the prompt's tokens were on host"
            finally:
                engine.cache.shutdown(0.0)
    note = f"killed; {HOST_GB} GB of host memory, {PREFIX_TOKENS} tokens hit; own start {statistics.median(own):.2f} s"
    return run.of(beyond, note=note)


def main(socket: str) -> None:
    """The engine that will be killed."""
    engine = compose(parse_args(flags(socket)))
    first_token(engine)
    while not engine.cache.idle():
        engine.cache.poll()
    print("computed", flush=True)
    signal.pause()


if __name__ == "__main__":
    main(sys.argv[1])
