"""Kill -9 and SIGSTOP of a node and its engines at random moments of transfers; `make soak` is the long version."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SPOILED = """
import sys
from tests.soak import __main__ as soak, engine
whole = engine.page_of
engine.page_of = lambda key: whole(key) ^ (key.view("u8")[0] % 2 == 0)
sys.exit(soak.main())
"""


def soak(*command: str, rounds: int) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *command, "--rounds", str(rounds)], cwd=ROOT, capture_output=True, text=True, check=False
    )


@pytest.mark.slow
@pytest.mark.timeout(1200)  # what a stuck machine may take; alone it is a minute
def test_no_wrong_byte_no_leaked_frame_no_hang(capsys: pytest.CaptureFixture[str]) -> None:
    finished = soak("-m", "tests.soak", rounds=200)
    with capsys.disabled():
        print("\n" + finished.stdout.strip())
    assert finished.returncode == 0, finished.stderr
    assert "200 rounds" in finished.stdout


def test_progress_and_a_summary_are_told() -> None:
    finished = soak("-m", "tests.soak", rounds=2)
    assert finished.returncode == 0, finished.stderr
    first, progress, done, *lines = finished.stdout.splitlines()
    assert first.startswith("soak: 2 rounds, 3 engines, seed ")
    assert progress.startswith("soak: round 1 of 2, ")
    assert done == "soak: done"
    assert [line.split("  ")[1] for line in lines][:3] == ["rounds", "machine", "killed"]
    assert "no wrong byte" in lines[-1]


def test_a_wrong_byte_is_found() -> None:
    finished = soak("-c", SPOILED, rounds=5)
    assert finished.returncode == 1
    assert "holds wrong bytes" in finished.stderr
    assert "seed" in finished.stderr
