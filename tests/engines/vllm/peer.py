"""A second engine, in a process of its own, that does what it is told.

    python -m tests.engines.vllm.peer DESCRIPTOR OPTIONS NAMED     what the class below starts

Over a pipe come the names and arguments of calls, and back goes what they return. Its stores can be held half-way: one
half of the pages has been copied, the other has not.
"""

from __future__ import annotations

import json
import operator
import signal
import subprocess
import sys
from collections.abc import Mapping
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any, Self

from tests.helpers.caches import Gate

HANG_S = 120.0


class Peer:
    """The other process. A context: entering waits until its engine serves, leaving ends it in order. `options` and
    `named` as for a `SteppedEngine`."""

    def __init__(self, options: Mapping[str, object], environment: Mapping[str, str], **named: object) -> None:
        self._ours, theirs = Pipe()
        command = [sys.executable, "-m", "tests.engines.vllm.peer", str(theirs.fileno())]
        with theirs:
            self.process = subprocess.Popen(
                [*command, json.dumps(options), json.dumps(named)], env=environment, pass_fds=[theirs.fileno()]
            )

    def __enter__(self) -> Self:
        assert self.receive() == "serves"
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._ours.close()
        if error is not None:
            self.kill()
        self.process.wait(HANG_S)

    def call(self, name: str, *arguments: object) -> Any:
        """What its engine's method returns, or `Held`'s."""
        self.send(name, *arguments)
        return self.receive()

    def send(self, name: str, *arguments: object) -> None:
        """The first half of `call`."""
        self._ours.send((name, arguments))

    def receive(self) -> Any:
        """The second half."""
        assert self._ours.poll(HANG_S), "the other engine does not answer"
        return self._ours.recv()

    def stop(self) -> None:
        self.process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(HANG_S)


class Held:
    """Stores of this process, which can be made to stand still half-way."""

    def __init__(self) -> None:
        self._gate = Gate()

    def hold(self) -> None:
        """From the next one on."""
        from engine_plugin.memory.transfer import RegionPartTransfer

        gate = self._gate = Gate()
        copy = RegionPartTransfer.copy_out

        def held(transfer: RegionPartTransfer, pages: Any, frames: Any) -> None:
            middle = len(pages) // 2
            copy(transfer, pages[:middle], frames[:middle])
            gate.pass_through()
            copy(transfer, pages[middle:], frames[middle:])

        RegionPartTransfer.copy_out = held  # type: ignore[method-assign]

    def is_held(self) -> bool:
        """Waits until one stands still."""
        return self._gate.arrived.wait(HANG_S)

    def release(self) -> None:
        """This one and those to come go on."""
        self._gate.opened.set()


def serve(connection: Connection, options: dict[str, object], named: dict[str, object]) -> None:
    """Until the other end is closed."""
    from tests.engines.vllm.stepped import SteppedEngine

    held = Held()
    with SteppedEngine(options, **named) as engine:
        connection.send("serves")
        while True:
            try:
                name, arguments = connection.recv()
            except EOFError:
                held.release()
                return
            target = held if name in vars(Held) else engine
            connection.send(operator.methodcaller(name, *arguments)(target))


if __name__ == "__main__":
    serve(Connection(int(sys.argv[1])), json.loads(sys.argv[2]), json.loads(sys.argv[3]))
