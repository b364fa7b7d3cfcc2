"""A real daemon in its own process, with folders of its own and any free port."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from cachesvc.config.model import ENV_PREFIX
from cachesvc.daemon.claim import RunInfo, read_run_info
from tests.helpers.process import ServingProcess

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

    def run(self, *arguments: str, max_descriptors: int | None = None, **more: str) -> subprocess.CompletedProcess[str]:
        """`cachesvc ARGUMENTS` to its end."""
        return subprocess.run(
            limited([*COMMAND, *arguments], max_descriptors),
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


def limited(command: list[str], max_descriptors: int | None) -> list[str]:
    """The command under `ulimit -n`, which it cannot raise again."""
    if max_descriptors is None:
        return command
    return ["sh", "-c", f'ulimit -n {max_descriptors}; exec "$@"', "sh", *command]


class DaemonProcess(ServingProcess):
    def __init__(
        self, home: Home, *flags: str, port: int = 0, max_descriptors: int | None = None, **environment: str
    ) -> None:
        self.home = home
        command = limited([*COMMAND, "up", "--admin.port", str(port), *flags], max_descriptors)
        super().__init__(command, home.path, home.environment(**environment), HANG_S)

    def hears(self, line: str) -> bool:
        return line == "ready\n"

    def base_url(self) -> str:
        return self.info.admin_url

    @property
    def info(self) -> RunInfo:
        """What it says about itself beside its socket."""
        info = read_run_info(self.home.socket)
        assert info is not None
        return info
