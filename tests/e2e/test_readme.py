"""README's page about the daemon, followed word for word: its commands, in its order, give what it says."""

from __future__ import annotations

import json
import re
import shutil
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.helpers.daemon import HANG_S, Home

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
HEADING = "## One node for all engines of a machine"
LOADING_S = 100.0

SHIM = """#!{python}
import sys
if sys.argv[1] == "engine":  # an entry point, which a tree that is not installed has not
    from engine_plugin.launch_server import command
    sys.exit(command(sys.argv[2:]))
from cachesvc.cli import main
sys.exit(main())
"""


def page() -> str:
    """From the heading to the next one."""
    return README[README.index(HEADING) :].split("\n## ")[0]


def commands() -> list[str]:
    return re.findall(r"^```\n(.*?)^```$", page(), re.MULTILINE | re.DOTALL)


class Terminal:
    """A shell in which one command runs until it is stopped."""

    def __init__(self, home: Home, command: str) -> None:
        self.output: list[str] = []
        self._heard = threading.Condition()
        self._process = subprocess.Popen(
            ["bash", "-c", f"exec {command}"],
            cwd=home.path,
            env=home.environment(OMP_NUM_THREADS="1"),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def wait_for(self, start: str) -> None:
        """Until it has printed a line that starts like this."""
        with self._heard:
            is_heard = self._heard.wait_for(lambda: self._has(start) or self._process.poll() is not None, LOADING_S)
        assert is_heard and self._has(start), "".join(self.output)

    def press_ctrl_c(self) -> None:
        self._process.send_signal(2)
        assert self._process.wait(HANG_S) == 0, "".join(self.output)
        self._reader.join(HANG_S)

    def close(self) -> None:
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait(HANG_S)
        self._reader.join(HANG_S)
        assert self._process.stdout is not None
        self._process.stdout.close()

    def _has(self, start: str) -> bool:
        return any(line.startswith(start) for line in self.output)

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            with self._heard:
                self.output.append(line)
                self._heard.notify_all()
        with self._heard:
            self._heard.notify_all()


@pytest.fixture
def home() -> Iterator[Home]:
    made = Home()
    shim = made.path / ".venv" / "bin" / "cachesvc"
    shim.parent.mkdir(parents=True)
    shim.write_text(SHIM.format(python=sys.executable))
    shim.chmod(stat.S_IRWXU)
    yield made
    made.remove()


@pytest.fixture
def terminals() -> Iterator[list[Terminal]]:
    opened: list[Terminal] = []
    yield opened
    for terminal in reversed(opened):
        terminal.close()


def run(home: Home, command: str) -> str:
    ended = subprocess.run(
        ["bash", "-c", command],
        cwd=home.path,
        env=home.environment(),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=LOADING_S,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


def published_pages(terminal: Terminal) -> float:
    """Of the daemon in this terminal, by the address it printed."""
    url = next(line.split()[1] for line in terminal.output if line.startswith("admin "))
    lines = httpx.get(f"{url}/metrics", timeout=HANG_S).text.splitlines()
    return next(float(line.split()[1]) for line in lines if line.startswith("cachesvc_published_pages_total "))


@pytest.mark.slow
@pytest.mark.system
@pytest.mark.timeout(300)
def test_the_page_does_what_it_says(home: Home, terminals: list[Terminal]) -> None:
    assert shutil.which("curl"), "needs curl (Debian package curl)"
    up, first_engine, second_engine, ask_first, ask_second, status = commands()
    for command, word in ((up, "ready"), (first_engine, "serving"), (second_engine, "serving")):
        terminals.append(Terminal(home, command))
        terminals[-1].wait_for(word)
    first = json.loads(run(home, ask_first))
    expected = json.loads(re.findall(r'"cached_tokens_details": (\{.*?\})', page())[0])
    # A person takes a moment to go to the other terminal; the pages of the answer are copied meanwhile.
    deadline = time.monotonic() + HANG_S
    while published_pages(terminals[0]) < expected["storage"] // 64:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    second = json.loads(run(home, ask_second))
    assert second["output_ids"] == first["output_ids"]
    assert first["meta_info"]["cached_tokens"] == 0
    assert second["meta_info"]["cached_tokens_details"] == expected
    shown = run(home, status)
    assert "ready" in shown
    assert shown.count("smollm2-135m@") == 2

    terminals[1].press_ctrl_c()
    terminals.append(Terminal(home, first_engine))
    terminals[-1].wait_for("serving")
    again = json.loads(run(home, ask_first))
    assert again["output_ids"] == first["output_ids"]
    assert again["meta_info"]["cached_tokens_details"]["host"] == expected["storage"]
