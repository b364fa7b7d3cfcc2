"""A real server in its own process, on a free port, with a tiny model of random weights."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import Any

from tests.helpers.process import ServingProcess

MODEL = "random:1"
HANG_S = 100.0
ROOT = Path(__file__).parents[2]


def environment() -> dict[str, str]:
    """The tests' own import path, so that a source tree needs no installation; one thread, as cores are shared."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OMP_NUM_THREADS": "1"}


class ServerProcess(ServingProcess):
    def __init__(self, *flags: str) -> None:
        launch = [sys.executable, "-m", "engine_plugin.launch_server"]
        super().__init__([*launch, "--model-path", MODEL, "--port", "0", *flags], ROOT, environment(), HANG_S)
        self.url = ""

    def hears(self, line: str) -> bool:
        found = re.search(r"^serving\s+(http://\S+)", line)
        self.url = found[1] if found else ""
        return bool(found)

    def base_url(self) -> str:
        return self.url

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
