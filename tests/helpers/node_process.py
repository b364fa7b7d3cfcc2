"""A node in a process of its own, to be stopped, killed and started again."""

from __future__ import annotations

import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


class NodeProcess:
    """`tests.helpers.channel_node` at a path that stays the same across starts. `with` it."""

    def __init__(self, storage: Path | None = None) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="cs-")
        self.path = Path(self._folder.name) / "n.sock"
        self._storage = [] if storage is None else [str(storage)]
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> NodeProcess:
        """Returns when it listens."""
        command = [sys.executable, "-m", "tests.helpers.channel_node", str(self.path), *self._storage]
        self._process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == b"ready\n"
        return self

    def freeze(self) -> None:
        """It does nothing more until `thaw`, or its end."""
        self._signal(signal.SIGSTOP)

    def thaw(self) -> None:
        self._signal(signal.SIGCONT)

    def kill(self) -> None:
        """Returns when it is gone, however it was."""
        self._signal(signal.SIGKILL)
        self._wait()

    def stop(self) -> None:
        """In good order."""
        process = self._running()
        assert process.stdin is not None
        process.stdin.close()
        self._wait()

    @property
    def pid(self) -> int:
        return self._running().pid

    def _running(self) -> subprocess.Popen[bytes]:
        assert self._process is not None, "not started"
        return self._process

    def _signal(self, number: signal.Signals) -> None:
        self._running().send_signal(number)

    def _wait(self) -> None:
        process = self._running()
        process.wait()
        for stream in (process.stdin, process.stdout):
            assert stream is not None
            stream.close()
        self._process = None

    def __enter__(self) -> NodeProcess:
        return self.start()

    def __exit__(self, *_: Any) -> None:
        if self._process is not None:
            self.kill()
        self._folder.cleanup()
