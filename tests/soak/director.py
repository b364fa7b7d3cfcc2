"""Forks the processes of a soak, strikes them, and waits for what must follow.

DESIGN. The director imports everything once and starts no thread, so that forking an engine takes milliseconds and not
the second that Python takes to start. Whoever it did not kill itself must not end.
"""

from __future__ import annotations

import faulthandler
import os
import random
import signal
import sys
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from tests.soak import engine, node
from tests.soak.board import NODE, Board, Field, Hang, Phase

KIND = {True: "node", False: "engine"}


class Failure(Exception):
    """What a soak is there to find."""


class Director:
    """Row NODE of the board is the node's place, the others are engines'. `with` it: all processes end with it."""

    def __init__(self, folder: Path, num_engines: int, seed: int) -> None:
        self.round = 0
        self.kills: Counter[str] = Counter()
        self.stops: Counter[str] = Counter()
        self.rows = range(num_engines + 1)
        self.engines = range(1, num_engines + 1)
        self.board = Board(len(self.rows))
        self._folder = folder
        self._seed = seed
        self._starts = 0
        self._pids: dict[int, int] = {}
        self._leave = os.pipe()  # its end tells children left behind to go
        for row in self.rows:
            self._start(row)

    def __enter__(self) -> Director:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._leave[1])
        for row in list(self._pids):
            self._kill(row)

    def strike(self, chance: random.Random) -> None:
        """A fault at a random moment of whatever runs."""
        if chance.random() < 0.1:
            self._replace_the_neighbour(chance)
        else:
            self._kill_and_stop(chance)

    def _replace_the_neighbour(self, chance: random.Random) -> None:
        """Of two engines with the same claim, one is cut off and stopped, and the other one is killed: its successor
        must not get the region of the one that lives."""
        alive, replaced = chance.sample(self.engines[:2], 2)
        before = self.board.get(alive, Field.CUT)
        self.board.put(alive, Field.CUT_WANTED, 1)
        self._wait("a cut", lambda: self.board.get(alive, Field.CUT) > before)
        self._signal(alive, signal.SIGSTOP)
        self.stops["engine"] += 1
        self._kill(replaced)
        self.kills["engine"] += 1
        served = self.board.get(replaced, Field.SERVED)
        self._start(replaced)
        self._wait("a successor", lambda: self.board.get(replaced, Field.SERVED) > served)
        self._signal(alive, signal.SIGCONT)

    def _kill_and_stop(self, chance: random.Random) -> None:
        """One process, or two at once."""
        victims = {NODE} if chance.random() < 0.35 else {chance.choice(self.engines)}
        if chance.random() < 0.1:
            victims |= {NODE, chance.choice(self.engines)}
        self._let_pass(chance.randrange(12))
        killed = {row for row in victims if chance.random() < 0.65}
        for row in victims - killed:
            self._signal(row, signal.SIGSTOP)
            self.stops[KIND[row == NODE]] += 1
        for row in sorted(killed, key=lambda _: chance.random()):
            self._kill(row)
            self.kills[KIND[row == NODE]] += 1
        self._let_pass(chance.randrange(6), but=victims)
        for row in sorted(victims, key=lambda _: chance.random()):
            if row in killed:
                self._start(row)
            else:
                self._signal(row, signal.SIGCONT)

    def wait_until_served(self) -> None:
        """Every engine takes one more op to its end, with the node that is there."""
        before = {row: self.board.get(row, Field.SERVED) for row in self.engines}
        self._wait(
            "an op of each engine",
            lambda: all(self.board.get(row, Field.SERVED) > before[row] for row in self.engines),
        )

    def quiet_moment(self) -> None:
        """Everybody stops asking; then all is accounted for, on both sides."""
        board = self.board
        board.order(Phase.QUIET)
        self._wait("quiet", lambda: all(board.get(row, Field.QUIET) == board.moment for row in self.engines))
        audits = board.get(NODE, Field.AUDITS)
        self._wait("two audits of an idle node", lambda: board.get(NODE, Field.AUDITS) >= audits + 2)
        for field, expected in ((Field.BROKEN, 0), (Field.EXCEPTIONS, 0), (Field.ATTACHED, len(self.engines))):
            if board.get(NODE, field) != expected:
                raise Failure(f"the idle node has {field.name} {board.get(NODE, field)}, expected {expected}")
        board.order(Phase.RUN)

    def end(self) -> None:
        """All leave in order: engines first, each with status 0."""
        self.quiet_moment()
        self.board.order(Phase.STOP)
        for row in (*self.engines, NODE):
            _, status = os.waitpid(self._pids.pop(row), 0)
            if status:
                raise Failure(f"{self._name(row)} left with status {os.waitstatus_to_exitcode(status)}")

    # Processes

    def _start(self, row: int) -> None:
        self._starts += 1
        seed = self._seed + self._starts
        if row == NODE:
            self.board.put(NODE, Field.AUDITS, 0)
        pid = os.fork()
        if pid:
            self._pids[row] = pid
            return
        os.close(self._leave[1])
        faulthandler.enable()
        faulthandler.register(signal.SIGUSR1)
        status = 3
        try:
            if row == NODE:
                node.run(self.board, self._folder)
            else:
                engine.run(self.board, row, self._folder, seed, self._leave[0])
            status = 0
        except BaseException:
            print(f"{self._name(row)} (start {self._starts}):", file=sys.stderr)
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(status)

    def _signal(self, row: int, number: signal.Signals) -> None:
        os.kill(self._pids[row], number)

    def _kill(self, row: int) -> None:
        pid = self._pids.pop(row)
        os.kill(pid, signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
        if os.waitstatus_to_exitcode(status) != -signal.SIGKILL:
            raise Failure(f"{self._name(row)} had ended with status {os.waitstatus_to_exitcode(status)}")

    def _name(self, row: int) -> str:
        return "the node" if row == NODE else f"engine {row}"

    # Waiting

    def _let_pass(self, steps: int, but: frozenset[int] | set[int] = frozenset()) -> None:
        """Until any process not in `but` has taken so many steps."""
        others = [row for row in self.rows if row not in but]
        before = self._steps(others)
        if others:
            self._wait("steps", lambda: self._steps(others) >= before + steps)

    def _steps(self, rows: list[int]) -> int:
        return sum(self.board.get(row, Field.STEPS) for row in rows)

    def _wait(self, what: str, is_so: Callable[[], bool]) -> None:
        try:
            self.board.wait(what, is_so, self._look_for_the_dead)
        except Hang as hang:
            for row in self._pids:
                self._signal(row, signal.SIGCONT)
                self._signal(row, signal.SIGUSR1)
            raise Failure(str(hang)) from None

    def _look_for_the_dead(self) -> None:
        for row, pid in self._pids.items():
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                del self._pids[row]
                code = os.waitstatus_to_exitcode(status)
                raise Failure(f"{self._name(row)} ended by itself with status {code}")
