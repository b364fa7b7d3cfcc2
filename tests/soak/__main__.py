"""`python -m tests.soak [--rounds N] [--seed S] [--engines E]`: a node and engines that are killed and stopped.

In each round a fault strikes at a random moment: SIGKILL, or SIGSTOP and later SIGCONT, of the node, of an engine, or
of both. Then everybody must get on: each engine takes an op to its end with a node. In quiet moments nothing may be
lent, leaked or broken. One line at the end says what was seen; status 1 and the reason when something was wrong.
"""

from __future__ import annotations

import argparse
import logging
import os
import random
import sys
import tempfile
import time
from pathlib import Path

from tests.soak.board import Field
from tests.soak.director import Director, Failure

ROUNDS_BETWEEN_QUIET = 20


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
            play(stage, options.rounds, random.Random(seed))
        except Failure as failure:
            print(f"soak: FAILED in round {stage.round} (seed {seed}): {failure}", file=sys.stderr)
            return 1
        print(summary(stage, time.monotonic() - began_s))
    return 0


def play(stage: Director, rounds: int, chance: random.Random) -> None:
    """All rounds, a quiet moment after every few of them, and the end."""
    stage.wait_until_served()
    for number in range(1, rounds + 1):
        stage.round = number
        stage.strike(chance)
        stage.wait_until_served()
        if number % ROUNDS_BETWEEN_QUIET == 0 or number == rounds:
            stage.quiet_moment()
    stage.end()


def summary(stage: Director, seconds: float) -> str:
    """What was seen, in one line."""
    totals = {field: sum(stage.board.get(row, field) for row in stage.rows) for field in Field}
    return (
        f"soak: {stage.round} rounds in {seconds:.0f} s: killed {stage.kills['node']} nodes and "
        f"{stage.kills['engine']} engines, stopped {stage.stops['node']} and {stage.stops['engine']}, cut "
        f"{totals[Field.CUT]} connections; "
        f"{totals[Field.SERVED]} ops served, {totals[Field.CHECKED]} pages compared, {totals[Field.ADOPTED]} pages of "
        f"predecessors taken over, {totals[Field.FORKED]} children left behind; no wrong byte, no leaked frame, no hang"
    )


if __name__ == "__main__":
    sys.exit(main())
