"""vLLM as people run it: `vllm serve` with the line that `cachesvc flags vllm` prints, over HTTP."""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import psutil

from tests.engines.models import MODELS
from tests.engines.vllm import settings
from tests.engines.vllm.answers import Answer
from tests.helpers.daemon import Home
from tests.helpers.process import ServingProcess

HANG_S = 280.0
MODEL = "model"
KV_BYTES = 64 * settings.MIB
FIRST_FORWARD = ("--compilation-config", '{"mode": 1, "backend": "eager"}')


class VllmServer(ServingProcess):
    """`vllm serve` in processes of its own, on a Unix socket. options: of the connector; None: vLLM without one."""

    def __init__(
        self,
        home: Home,
        options: dict[str, object] | None,
        model: str = settings.TINY,
        *,
        flags: Sequence[str] = (),
        dtype: str = "float32",
        kv_bytes: int | None = KV_BYTES,
        environment: Mapping[str, str] | None = None,
        configure: Callable[[dict[str, object]], dict[str, Any]] = settings.spied,
    ) -> None:
        """`configure` makes the value of --kv-transfer-config of the options.

        `kv_bytes` None: a GiB, and a first forward, as vLLM makes one for models that it compiles.
        """
        self._folder = tempfile.TemporaryDirectory(prefix="cs")
        self.socket = Path(self._folder.name) / "http.sock"
        config = None if options is None else configure(options)
        command = [
            *(sys.executable, "-m", "tests.engines.vllm.serve", "serve", str(MODELS / model)),
            *("--served-model-name", MODEL, "--uds", str(self.socket), "--dtype", dtype),
            *("--block-size", str(settings.BLOCK_SIZE)),
            *(FIRST_FORWARD if kv_bytes is None else ("--enforce-eager", "--kv-cache-memory-bytes", str(kv_bytes))),
            *("--enable-prompt-tokens-details", "--generation-config", "vllm", "--max-model-len", "8192"),
            *([] if config is None else ["--kv-transfer-config", json.dumps(config)]),
            *flags,
        ]
        own = {**settings.ENVIRONMENT, "VLLM_LOGGING_LEVEL": "INFO", "VLLM_SERVER_DEV_MODE": "1"}
        own["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1"  # whatever this process has set for itself
        if kv_bytes is None:
            own["VLLM_CPU_KVCACHE_SPACE"] = "1"
        super().__init__(command, home.path, home.environment(**{**own, **(environment or {})}), HANG_S)
        self._threads = ThreadPoolExecutor(64)

    def hears(self, line: str) -> bool:
        return "Application startup complete" in line

    def base_url(self) -> str:
        return "http://engine"

    def new_client(self) -> httpx.Client:
        limits = httpx.Limits(max_connections=64)
        transport = httpx.HTTPTransport(uds=str(self.socket), limits=limits)
        return httpx.Client(base_url=self.base_url(), transport=transport, timeout=HANG_S)

    def __exit__(self, *error: Any) -> None:
        self._threads.shutdown(cancel_futures=True)
        try:
            super().__exit__(*error)
        finally:
            self._folder.cleanup()

    # ---- processes

    def family(self) -> list[psutil.Process]:
        """Every process of this engine, the first one first."""
        first = psutil.Process(self.process.pid)
        return [first, *first.children(recursive=True)]

    def cpu_s(self) -> float:
        """User and system time of all of them so far."""
        times = [process.cpu_times() for process in self.family()]
        return sum(each.user + each.system for each in times)

    def kill(self) -> None:
        """All of it, as when a container is killed: vLLM's engine process outlives the one that started it."""
        for process in reversed(self.family()) if self.process.poll() is None else ():
            process.kill()
        super().kill()

    def worker(self) -> psutil.Process:
        """The process of its only rank."""
        [worker] = [process for process in self.family() if any("Worker" in word for word in process.cmdline())]
        return worker

    def kill_but(self, spared: psutil.Process) -> None:
        """All of it but one process, which keeps what it has."""
        for process in reversed(self.family()):
            if process != spared:
                process.kill()
        self.process.wait(HANG_S)

    # ---- requests

    def ask(self, prompt: list[int] | str, max_tokens: int = 4, *, rank: int | None = None, **more: Any) -> Answer:
        """One greedy completion. `rank`: the data-parallel rank that computes it, else vLLM's choice."""
        body = {
            "model": MODEL,
            "prompt": prompt,
            "max_tokens": max_tokens,
            "temperature": 0,
            "logprobs": 0,
            "ignore_eos": True,
            "return_token_ids": True,
            **more,
        }
        headers = {} if rank is None else {"X-data-parallel-rank": str(rank)}
        got = self.client.post("/v1/completions", json=body, headers=headers)
        assert got.status_code == 200, got.text
        choice, usage = got.json()["choices"][0], got.json()["usage"]
        details = usage.get("prompt_tokens_details") or {}
        return Answer(
            tuple(choice["token_ids"]),
            tuple(choice["logprobs"]["token_logprobs"]),
            details.get("cached_tokens") or 0,
            choice["finish_reason"],
        )

    def ask_soon(self, prompt: list[int] | str, max_tokens: int = 4, **more: Any) -> Future[Answer]:
        """The same on a thread."""
        return self._threads.submit(self.ask, prompt, max_tokens, **more)

    def forget_device(self) -> None:
        """The prefixes on the device; those below stay. Fails while anything holds a block."""
        got = self.client.post("/reset_prefix_cache")
        assert got.json() == {"success": True}, got.text

    def metrics(self) -> dict[str, float]:
        """Every sample by name and labels, as it is exposed."""
        lines = self.client.get("/metrics").text.splitlines()
        samples = (line.rsplit(" ", 1) for line in lines if line and not line.startswith("#"))
        return {name: float(value) for name, value in samples}

    def metric(self, name: str, *labels: str) -> float:
        """The sum of all samples of that name that have these labels, written `label="value"`."""
        own = (value for text, value in self.metrics().items() if _is(text, name, labels))
        return sum(own)


def _is(sample: str, name: str, labels: Sequence[str]) -> bool:
    return sample.partition("{")[0] == name and all(label in sample for label in labels)
