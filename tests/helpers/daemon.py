"""A real daemon in its own process, with folders of its own and any free port."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from types import TracebackType
from typing import Self

import httpx

from cachesvc.config.model import ENV_PREFIX
from cachesvc.daemon.claim import RunInfo, read_run_info

HANG_S = 60.0
ROOT = Path(__file__).parents[2]
COMMAND = [sys.executable, "-c", "import sys; from cachesvc.cli import main; sys.exit(main(sys.argv[1:]))"]


class Home:
    """Folders for one user's daemons: where sockets and stored pages go by default. Paths are short, as those of Unix
    sockets must be."""

    def __init__(self) -> None:
        self.path = Path(tempfile.mkdtemp(prefix="cs"))
        self.socket = self.path / "run" / "cachesvc" / "node.sock"
        self.pages = self.path / "cache" / "cachesvc" / "pages"

    def environment(self, **more: str) -> dict[str, str]:
        """For a child: the tests' import path, this home's folders, nothing of our own variables but `more`."""
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(ENV_PREFIX)}
        return {
            **inherited,
            "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), *sys.path])),
            "XDG_RUNTIME_DIR": str(self.path / "run"),
            "XDG_CACHE_HOME": str(self.path / "cache"),
            **more,
        }

    def run(self, *arguments: str, **more: str) -> subprocess.CompletedProcess[str]:
        """`cachesvc ARGUMENTS` to its end."""
        return subprocess.run(
            [*COMMAND, *arguments],
            cwd=self.path,
            env=self.environment(**more),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=HANG_S,
            check=False,
        )

    def remove(self) -> None:
        shutil.rmtree(self.path)


class DaemonProcess:
    """A context: entering waits for `ready`, leaving ends it and expects status 0. `output` is what it printed."""

    def __init__(self, home: Home, *flags: str, port: int = 0, **environment: str) -> None:
        self.home = home
        self._arguments = ["up", "--admin.port", str(port), *flags]
        self._environment = environment
        self.output: list[str] = []
        self._ready = threading.Event()

    def __enter__(self) -> Self:
        self.process = subprocess.Popen(
            [*COMMAND, *self._arguments],
            cwd=self.home.path,
            env=self.home.environment(**self._environment),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self._reader = threading.Thread(target=self._read)
        self._reader.start()
        if not self._ready.wait(HANG_S) or "ready\n" not in self.output:
            self.kill()
            assert self.process.stdout is not None
            self.process.stdout.close()
            raise AssertionError("the daemon did not start:\n" + "".join(self.output))
        self.client = httpx.Client(base_url=self.info.admin_url, timeout=HANG_S)
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

    @property
    def info(self) -> RunInfo:
        """What it says about itself beside its socket."""
        info = read_run_info(self.home.socket)
        assert info is not None
        return info

    def terminate(self) -> int:
        """SIGTERM; the exit status."""
        self.process.terminate()
        return self.process.wait(HANG_S)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(HANG_S)
        self._reader.join(HANG_S)

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.output.append(line)
            if line == "ready\n":
                self._ready.set()
        self._ready.set()
