"""A real server in its own process, on a free port, with a tiny model of random weights."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import httpx

MODEL = "random:1"
HANG_S = 100.0
ROOT = Path(__file__).parents[2]


def environment() -> dict[str, str]:
    """The tests' own import path, so that a source tree needs no installation; one thread, as cores are shared."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OMP_NUM_THREADS": "1"}


class ServerProcess:
    """A context: entering waits until it answers, leaving ends it and expects status 0. `output` is what it printed."""

    def __init__(self, *flags: str) -> None:
        launch = [sys.executable, "-m", "engine_plugin.launch_server"]
        self._command = [*launch, "--model-path", MODEL, "--port", "0", *flags]
        self.output: list[str] = []
        self.url = ""
        self._heard = threading.Event()

    def __enter__(self) -> Self:
        self.process = subprocess.Popen(
            self._command,
            cwd=ROOT,
            env=environment(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self._reader = threading.Thread(target=self._read)
        self._reader.start()
        if not self._heard.wait(HANG_S) or not self.url:
            self.kill()
            raise AssertionError("the server did not start:\n" + "".join(self.output))
        self.client = httpx.Client(base_url=self.url, timeout=HANG_S)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.client.close()
        if self.process.poll() is None:
            try:
                status = self.terminate()
            except subprocess.TimeoutExpired:
                self.kill()
                raise
            assert status == 0 or error is not None, "".join(self.output)
        self._reader.join(HANG_S)
        assert self.process.stdout is not None
        self.process.stdout.close()

    def terminate(self) -> int:
        """SIGTERM; the exit status."""
        self.process.terminate()
        return self.process.wait(HANG_S)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(HANG_S)
        self._reader.join(HANG_S)

    def generate(self, **body: object) -> Any:
        response = self.client.post("/generate", json=body)
        assert response.status_code == 200, response.text
        return response.json()

    def counters(self) -> dict[str, float]:
        counters: dict[str, float] = self.client.get("/server_info").json()["internal_states"][0]
        return counters

    def flush(self) -> None:
        response = self.client.post("/flush_cache", params={"timeout": "60"})
        assert response.status_code == 200, response.text

    def assert_nothing_allocated(self) -> None:
        """Waits until idle; then every device page is free."""
        self.flush()
        counters = self.counters()
        assert counters["device_pages_free"] == counters["device_pages"]
        assert (counters["engine_running"], counters["engine_waiting"]) == (0, 0)

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.output.append(line)
            found = re.search(r"^serving\s+(http://\S+)", line)
            if found:
                self.url = found[1]
                self._heard.set()
        self._heard.set()
