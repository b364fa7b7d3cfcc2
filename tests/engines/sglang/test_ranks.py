"""Two ranks of one engine, a process each, with SGLang's own collectives (gloo): they agree, whatever one has."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.engines.sglang.processes import HANG_S, Daemon

RANKS = 2


def _run(scenario: str, daemon: Daemon, tmp_path: Path, revision: str) -> list[dict[str, int]]:
    """Both ranks of a scenario of `rank.py`; what each of them says."""
    meeting = tmp_path / "meeting"
    command = [sys.executable, "-m", "tests.engines.sglang.rank", scenario, daemon.address, str(meeting), revision]
    ranks = [
        subprocess.Popen(
            [*command, str(rank)], cwd=os.getcwd(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        for rank in range(RANKS)
    ]
    said = []
    try:
        for rank in ranks:
            output, errors = rank.communicate(timeout=HANG_S)
            assert rank.returncode == 0, errors[-4000:]
            said.append(json.loads(output.splitlines()[-1]))
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    return said


@pytest.mark.slow
@pytest.mark.parametrize("scenario", ["whole", "page_missing", "unequal_space", "one_without_storage"])
def test_ranks_agree_and_each_has_its_own_bytes(
    scenario: str, daemon: Daemon, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    first, second = _run(scenario, daemon, tmp_path, request.node.nodeid)
    assert first["fetched"] == second["fetched"], "what is loaded is what every rank has"
    assert first["wrong_rows"] == second["wrong_rows"] == 0
    expected = {
        "whole": (128, 128),
        "page_missing": (80, 80),
        "unequal_space": (16, 112),
        "one_without_storage": (0, 0),
    }
    least, most = expected[scenario]
    assert least <= first["fetched"] <= most
