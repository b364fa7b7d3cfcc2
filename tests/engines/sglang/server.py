"""SGLang's own server on a CPU, with flags as `cachesvc flags sglang` prints them, and what a client asks it."""

from __future__ import annotations

import json
import os
import random
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from tests.engines.sglang.processes import COMMAND, HANG_S, Daemon
from tests.engines.sglang.rig import Storage
from tests.helpers.process import ServingProcess

PLUGIN = Path(__file__).parent / "plugin"
ADMIN_KEY = "of-the-tests"
ON_A_CPU = (
    *(
        "--device",
        "cpu",
        "--skip-tokenizer-init",
        "--attention-backend",
        "torch_native",
        "--sampling-backend",
        "pytorch",
    ),
    *("--cuda-graph-backend-decode=disabled", "--cuda-graph-backend-prefill=disabled", "--skip-server-warmup"),
    *("--page-size", "64", "--dtype", "float32", "--enable-cache-report", "--admin-api-key", ADMIN_KEY),
)
START_S = 900.0


def launch_flags(daemon: Daemon, host_gib: float) -> list[str]:
    """What `cachesvc flags sglang` says comes after the model, for `host_gib` of the daemon's memory. For tests L2 is
    so large that nothing leaves it, and a request waits for all that L3 has."""
    command = [*COMMAND, "flags", "sglang", "--address", daemon.address, "--host-memory", str(host_gib), "--json"]
    printed = subprocess.run(command, cwd=daemon.folder, capture_output=True, text=True, check=True, timeout=HANG_S)
    line: list[str] = json.loads(printed.stdout)["argv"]
    assert line[:4] == ["sglang", "serve", "--model-path", "MODEL"]
    return [*line[4:], "--hicache-ratio", "4", "--hicache-storage-prefetch-policy", "wait_complete"]


class Answer(NamedTuple):
    """One completion: the tokens, seconds to the first one, and how many prompt tokens each tier had."""

    tokens: list[int]
    first_s: float
    device: int
    host: int
    storage: int


class Server(ServingProcess):
    """`python -m sglang.launch_server`. `with` it; `base` is the line's end after the model."""

    def __init__(self, model: Path, base: Sequence[str], *, device_tokens: int = 4096) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        own = [
            "--model-path",
            str(model),
            "--port",
            str(self.port),
            "--max-total-tokens",
            str(device_tokens),
            *ON_A_CPU,
        ]
        paths = [str(PLUGIN), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "HF_HUB_OFFLINE": "1"}
        super().__init__([sys.executable, "-m", "sglang.launch_server", *own, *base], model, environment, START_S)

    def hears(self, line: str) -> bool:
        return "ready to roll" in line

    def base_url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def ask(self, prompt: Sequence[int], new_tokens: int = 8) -> Answer:
        """Greedy tokens of one request, streamed."""
        body = {
            "input_ids": list(prompt),
            "sampling_params": {"temperature": 0, "max_new_tokens": new_tokens, "ignore_eos": True},
            "stream": True,
        }
        begun_s, first_s, last = time.perf_counter(), 0.0, {}
        with self.client.stream("POST", "/generate", json=body) as response:
            assert response.status_code == 200, response.read()
            for line in response.iter_lines():
                if line.startswith("data:") and "[DONE]" not in line:
                    first_s = first_s or time.perf_counter() - begun_s
                    last = json.loads(line.removeprefix("data:"))
        assert len(last["output_ids"]) == new_tokens, last
        found = last["meta_info"].get("cached_tokens_details") or {"device": 0, "host": 0, "storage": 0}
        return Answer(last["output_ids"], first_s, found["device"], found["host"], found["storage"])

    def attach(self, storage: Storage) -> None:
        """At runtime; SGLang wants no request to be under way."""
        self._when_idle("PUT", "/hicache/storage-backend", json=_attach_body(storage))

    def refuses(self, storage: Storage) -> None:
        """An attach that must not succeed."""
        headers = {"Authorization": f"Bearer {ADMIN_KEY}"}
        response = self.client.request("PUT", "/hicache/storage-backend", headers=headers, json=_attach_body(storage))
        assert response.status_code == 400, response.text

    def detach(self) -> None:
        """At runtime. When it returns, everything computed so far is stored."""
        self._when_idle("DELETE", "/hicache/storage-backend")

    def flush(self) -> None:
        """Device and host memory; storage keeps what it has."""
        self._when_idle("POST", "/flush_cache")

    def _when_idle(self, method: str, path: str, **more: Any) -> None:
        headers = {"Authorization": f"Bearer {ADMIN_KEY}"}
        deadline_s = time.monotonic() + HANG_S
        while (response := self.client.request(method, path, headers=headers, **more)).status_code != 200:
            assert time.monotonic() < deadline_s, f"{method} {path}: {response.text}"
            assert response.status_code == 400 and "idle" in response.text.lower(), response.text

    def terminate(self) -> int:
        """SIGTERM to the launcher, which ends its children; 0 when all are gone."""
        family = [self._launcher(), *self._launcher().children(recursive=True)]
        status = super().terminate()
        _, alive = psutil.wait_procs(family[1:], timeout=self._hang_s)
        assert not alive, alive
        return 0 if status in (0, -15) else status

    def kill(self) -> None:
        """As an out-of-memory killer would: every process of the server, by its pid."""
        family = self._launcher().children(recursive=True) if self.process.poll() is None else []
        for process in family:
            process.kill()
        super().kill()
        psutil.wait_procs(family, timeout=self._hang_s)

    def _launcher(self) -> psutil.Process:
        return psutil.Process(self.process.pid)


def _attach_body(storage: Storage) -> dict[str, Any]:
    return {
        "hicache_storage_backend": storage.backend,
        "hicache_storage_backend_extra_config_json": storage.extra_json(),
        "hicache_storage_prefetch_policy": "wait_complete",
    }


def prompt(seed: int, tokens: int = 2000, vocabulary: int = 1000) -> list[int]:
    """Token ids; equal seeds, equal prompts."""
    draw = random.Random(seed)
    return [draw.randrange(vocabulary) for _ in range(tokens)]
