"""Processes of the tests: a daemon that holds pages, as users start it."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import tempfile
from pathlib import Path
from typing import Any

from tests.helpers.process import ServingProcess

HANG_S = 120.0
COMMAND = [sys.executable, "-c", "import sys; from cachesvc.cli import main; sys.exit(main(sys.argv[1:]))"]
DOORS = ("--grpc.address", "off", "--admin.port", "0")


class Daemon(ServingProcess):
    """`cachesvc up` at a socket that stays the same over its restarts, in a folder of its own. `with` it.

    It runs the installed package, wherever the tests lie: nothing is added to its import path.
    """

    def __init__(
        self, *flags: str, managed: str | None = "256 MiB", keeps_files: bool = False, capacity: str = "256 MiB"
    ) -> None:
        # Short, as paths of Unix sockets must be.
        self.folder = Path(tempfile.mkdtemp(prefix="cs"))
        self.socket = self.folder / "n.sock"
        environment = {
            **os.environ,
            "XDG_CACHE_HOME": str(self.folder / "cache"),
            "CACHESVC_CHANNEL_SOCKET": str(self.socket),
        }
        self.pages = self.folder / "pages"
        options = {"path": str(self.pages), "capacity_bytes": capacity}
        tiers = [{"backend": "file", "options": options}] if keeps_files else []
        memory = () if managed is None else ("--memory.managed-bytes", managed)
        command = [*COMMAND, "up", *DOORS, *memory, "--tier", json.dumps(tiers), *flags]
        super().__init__(command, self.folder, environment, HANG_S)
        self._base_url = ""

    @property
    def address(self) -> str:
        return f"unix://{self.socket}"

    def hears(self, line: str) -> bool:
        if line.startswith("admin "):
            self._base_url = line.split()[1]
        return line == "ready\n"

    def base_url(self) -> str:
        return self._base_url

    def freeze(self) -> None:
        """It does nothing more until `thaw`, or its end."""
        self.process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def start_again(self) -> Daemon:
        """After its end: a new one at the same socket and folder."""
        self.client.close()
        self._close_output()
        self._forget_start()
        self.__enter__()
        return self

    def _forget_start(self) -> None:
        self._heard.clear()
        self._serves = False

    def __exit__(self, *error: Any) -> None:
        try:
            if self.process.poll() is None:
                self.thaw()
            super().__exit__(*error)
        finally:
            shutil.rmtree(self.folder, ignore_errors=True)
