"""The daemon itself: what it takes on disk and in memory before any engine comes."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import distribution
from pathlib import Path

from packaging.requirements import Requirement

from bench.harness import Measurement, Run, figure
from cachesvc.config.model import ENV_PREFIX
from cachesvc.daemon.claim import read_run_info

ROOT = Path(__file__).parents[1]
COMMAND = [sys.executable, "-c", "import sys; from cachesvc.cli import main; sys.exit(main(sys.argv[1:]))"]
MB = 1e6
END_S = 30.0


@contextmanager
def running_daemon() -> Iterator[tuple[int, str]]:
    """A daemon in folders of its own that is ready: its pid and the URL of its admin door."""
    home = Path(tempfile.mkdtemp(prefix="cs"))
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(ENV_PREFIX)}
    folders = {"XDG_RUNTIME_DIR": str(home), "XDG_CACHE_HOME": str(home)}
    path = {"PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), *sys.path]))}
    process = subprocess.Popen(
        [*COMMAND, "up", "--admin.port", "0"], env={**inherited, **folders, **path}, stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        if "ready\n" not in iter(process.stdout.readline, ""):
            raise AssertionError("the daemon did not start")
        info = read_run_info(home / "cachesvc" / "node.sock")
        assert info is not None
        yield process.pid, info.admin_url
    finally:
        process.terminate()
        process.wait(END_S)
        shutil.rmtree(home)


def resident_bytes(pid: int) -> int:
    """Resident memory of a process, shared memory apart."""
    status = Path(f"/proc/{pid}/status").read_text()
    fields = {
        name: int(kib) * 1024 for name, kib in re.findall(r"^(VmRSS|RssShmem):\s+(\d+) kB$", status, re.MULTILINE)
    }
    return fields["VmRSS"] - fields["RssShmem"]


@figure("daemon.idle_rss", unit="MB", target="value<=120")
def idle_memory(run: Run) -> Measurement:
    """A daemon with all doors open, after the first scrape."""
    samples = []
    for _ in range(min(run.rounds, 3)):
        with running_daemon() as (pid, url):
            urllib.request.urlopen(f"{url}/metrics").read()
            samples.append(resident_bytes(pid) / MB)
    return run.of(samples, note="all doors, file tier, no engine; regions come on top")


def needed_by(extra: str) -> set[str]:
    """Names of the distributions that `cachesvc[extra]` brings, itself apart."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    waiting = [Requirement(line) for line in (*project["dependencies"], *project["optional-dependencies"][extra])]
    names: set[str] = set()
    while waiting:
        requirement = waiting.pop()
        if requirement.name in names or not (requirement.marker is None or requirement.marker.evaluate({"extra": ""})):
            continue
        names.add(requirement.name)
        waiting += [Requirement(line) for line in distribution(requirement.name).requires or []]
    return names


def size_of(folder: Path) -> int:
    """Bytes of the files below a folder that a wheel would have."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file() and "__pycache__" not in path.parts)


@figure("daemon.installed", unit="MB", target="value<=150")
def installed_size(run: Run) -> Measurement:
    """What the extra `server` puts on the disk, compiled files included, as installed here."""
    total = 0
    for name in needed_by("server"):
        found = distribution(name)
        paths = [Path(str(found.locate_file(file))) for file in found.files or []]
        total += sum(path.stat().st_size for path in paths if path.is_file())
    ours = [
        ROOT / "kernels" / "cachekernels",
        *(ROOT / name for name in ("storage_backends", "cachesvc", "engine_plugin")),
    ]
    total += sum(map(size_of, ours))
    return run.of([total / MB], note="with numpy, grpcio and uvloop; without torch")
