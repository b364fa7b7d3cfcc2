"""`python -m tests.soak [--rounds N] [--seed S] [--engines E]`: a node and engines that are killed and stopped.

In each round a fault strikes at a random moment: SIGKILL, or SIGSTOP and later SIGCONT, of the node, of an engine, or
of both. Then everybody must get on: each engine takes an op to its end with a node. In quiet moments nothing may be
lent, leaked or broken. A line says now and then how far it is; the summary at the end says what was done and seen, on
which machine and with which seed, so that it can stand in a note as it is. Status 1 and the reason when something was
wrong.
"""

from __future__ import annotations

import argparse
import logging
import os
import platform
import random
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from tests.soak.board import Field
from tests.soak.director import Director, Failure

ROUNDS_BETWEEN_QUIET = 20
PROGRESS_LINES = 20


def main() -> int:
    """Returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.soak")
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--seed", type=int, default=None, help="of all that is random here; default: a new one")
    parser.add_argument("--engines", type=int, default=3)
    options = parser.parse_args()
    logging.basicConfig(level=logging.ERROR)  # that nodes come and go is no news here
    seed = int.from_bytes(os.urandom(4), "little") if options.seed is None else options.seed
    print(f"soak: {options.rounds} rounds, {options.engines} engines, seed {seed}", flush=True)
    began_s = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="soak-") as folder, Director(Path(folder), options.engines, seed) as stage:
        try:
            play(stage, options.rounds, random.Random(seed), lambda: tell(stage, options.rounds, began_s))
        except Failure as failure:
            print(f"soak: FAILED in round {stage.round} (seed {seed}): {failure}", file=sys.stderr)
            return 1
        print(summary(stage, seed, time.monotonic() - began_s))
    return 0


def play(stage: Director, rounds: int, chance: random.Random, on_progress: Callable[[], None]) -> None:
    """All rounds, a quiet moment after every few of them, and the end."""
    every = max(1, rounds // PROGRESS_LINES)
    stage.wait_until_served()
    for number in range(1, rounds + 1):
        stage.round = number
        stage.strike(chance)
        stage.wait_until_served()
        if number % ROUNDS_BETWEEN_QUIET == 0 or number == rounds:
            stage.quiet_moment()
        if number % every == 0 and number < rounds:
            on_progress()
    stage.end()


def tell(stage: Director, rounds: int, began_s: float) -> None:
    """How far it is."""
    seconds = time.monotonic() - began_s
    left_s = seconds / stage.round * (rounds - stage.round)
    served = total(stage, Field.SERVED)
    print(
        f"soak: round {stage.round:,} of {rounds:,}, {seconds:.0f} s, about {left_s:.0f} s to go: "
        f"{sum(stage.kills.values()):,} kills, {sum(stage.stops.values()):,} stops, {served:,} ops served, "
        f"{total(stage, Field.CHECKED):,} pages compared",
        flush=True,
    )


def total(stage: Director, field: Field) -> int:
    """Over all processes."""
    return sum(stage.board.get(row, field) for row in stage.rows)


def summary(stage: Director, seed: int, seconds: float) -> str:
    """What was done and what was seen."""
    kills, stops = stage.kills, stage.stops
    lines = {
        "rounds": f"{stage.round} rounds in {seconds:.0f} s, seed {seed}",
        "machine": f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, Linux {platform.release()}",
        "killed": f"{kills['node']:,} nodes, {kills['engine']:,} engines (SIGKILL)",
        "stopped": f"{stops['node']:,} nodes, {stops['engine']:,} engines (SIGSTOP, later SIGCONT)",
        "cut": f"{total(stage, Field.CUT):,} connections while both ends lived",
        "left behind": f"{total(stage, Field.FORKED):,} forked children that outlived their engine",
        "served": f"{total(stage, Field.SERVED):,} ops",
        "compared": f"{total(stage, Field.CHECKED):,} pages, word by word with what their keys say",
        "taken over": f"{total(stage, Field.ADOPTED):,} pages of predecessors",
        "found": "no wrong byte, no leaked frame, no broken rule of conservation, no hang",
    }
    return "\n".join(["soak: done", *(f"  {name:<12}{what}" for name, what in lines.items())])


if __name__ == "__main__":
    sys.exit(main())
