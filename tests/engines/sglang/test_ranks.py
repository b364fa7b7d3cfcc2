"""Two ranks of one engine, a process each, with SGLang's own collectives (gloo): they agree, whatever one has."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

from tests.engines.sglang.processes import Daemon

HANG_S = 280.0
RANKS = 2
LEAST_AND_MOST = {
    "whole": (128, 128),
    "page_missing": (80, 80),
    "pages_lost": (16, 112),
    "no_room": (0, 0),
    "some_room": (48, 48),
    "lost_after_the_query": (80, 80),
    "different_states": (32, 32),
    "one_without_storage": (0, 0),
}
"""Tokens that both ranks fetch, by scenario."""
REFUSED = {"no_room": 8, "some_room": 5}
"""Pages that the node of rank 1 had no room for; SGLang takes the whole batch for one that was not stored."""


@pytest.fixture(scope="module")
def told(shared_daemon: Daemon, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[dict[str, dict[str, int]]]]:
    """What each rank says about each scenario of `rank.py`; both play them all, one after the other."""
    meeting = tmp_path_factory.mktemp("ranks") / "meeting"
    with Daemon() as other:
        yield _play([shared_daemon.address, other.address, str(meeting)])


def _play(arguments: list[str]) -> list[dict[str, dict[str, int]]]:
    command = [sys.executable, "-m", "tests.engines.sglang.rank", *arguments]
    ranks = [
        subprocess.Popen(
            [*command, str(rank), *LEAST_AND_MOST],
            cwd=os.getcwd(),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
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
@pytest.mark.parametrize("scenario", LEAST_AND_MOST)
def test_ranks_agree_and_each_has_its_own_bytes(scenario: str, told: list[dict[str, dict[str, int]]]) -> None:
    first, second = (rank[scenario] for rank in told)
    assert first["fetched"] == second["fetched"], "what is loaded is what every rank has"
    assert first["wrong_rows"] == second["wrong_rows"] == 0
    least, most = LEAST_AND_MOST[scenario]
    assert least <= first["fetched"] <= most
    assert (first["refused"], second["refused"]) == (0, REFUSED.get(scenario, 0))
