"""A program that serves over HTTP, in a process of its own."""

from __future__ import annotations

import subprocess
import threading
from abc import ABC, abstractmethod
from pathlib import Path
from types import TracebackType
from typing import Self

import httpx


class ServingProcess(ABC):
    """A context: entering waits until it serves, leaving ends it and expects status 0. `output` is what it printed."""

    def __init__(self, command: list[str], cwd: Path, environment: dict[str, str], hang_s: float) -> None:
        self._command, self._cwd, self._environment = command, cwd, environment
        self._hang_s = hang_s
        self.output: list[str] = []
        self._heard = threading.Event()
        self._serves = False

    @abstractmethod
    def hears(self, line: str) -> bool:
        """Whether this line of its output says that it serves."""

    @abstractmethod
    def base_url(self) -> str:
        """Where, once it does."""

    def __enter__(self) -> Self:
        self.process = subprocess.Popen(
            self._command,
            cwd=self._cwd,
            env=self._environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self._reader = threading.Thread(target=self._read)
        self._reader.start()
        if not self._heard.wait(self._hang_s) or not self._serves:
            self.kill()
            self._close_output()
            raise AssertionError(f"{self._command} did not start:\n" + "".join(self.output))
        self.client = self.new_client()
        return self

    def new_client(self) -> httpx.Client:
        """Speaks to it."""
        return httpx.Client(base_url=self.base_url(), timeout=self._hang_s)

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
        self._close_output()

    def terminate(self) -> int:
        """SIGTERM; the exit status."""
        self.process.terminate()
        return self.process.wait(self._hang_s)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(self._hang_s)
        self._reader.join(self._hang_s)

    def _close_output(self) -> None:
        self._reader.join(self._hang_s)
        assert self.process.stdout is not None
        self.process.stdout.close()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.output.append(line)
            if not self._serves and self.hears(line):
                self._serves = True
                self._heard.set()
        self._heard.set()
