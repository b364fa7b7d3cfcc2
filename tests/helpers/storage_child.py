"""A process that uses a directory of objects: `python -m tests.helpers.storage_child COMMAND ROOT CAPACITY ...`.

Objects and their bytes follow from a number, so that every process can tell what an object must hold. Answers go to
stdout as one JSON value a line.
"""

from __future__ import annotations

import json
import os
import selectors
import signal
import sys
from collections import Counter
from pathlib import Path
from typing import NoReturn

import numpy as np
from cachekernels.files import FileIo
from numpy.typing import NDArray

from storage_backends.base import ObjectIds, Outcome
from storage_backends.file.backend import FileBackend
from storage_backends.file.config import FileConfig
from storage_backends.layers.checksum import ChecksumLayer
from storage_backends.testing.objects import Buffers, make_ids

NAMESPACE = bytes(range(32))
PAGE_BYTES = 4096
OBJECT_BYTES = 4096 + PAGE_BYTES


def ids_of(numbers: list[int]) -> ObjectIds:
    """Ids of objects by number."""
    return np.concatenate([make_ids(1, seed=10_000 + number) for number in numbers])


def pages_of(numbers: list[int]) -> Buffers:
    """What those objects hold."""
    pages = Buffers.make(len(numbers), PAGE_BYTES)
    for row, number in enumerate(numbers):
        pages.rows[row] = np.random.default_rng(number).integers(0, 256, PAGE_BYTES, dtype=np.uint8)
    return pages


def whole_pages_of(numbers: list[int]) -> Buffers:
    """Objects of these numbers as they are stored: any bytes, header and all."""
    return Buffers.make(len(numbers), OBJECT_BYTES, seed=numbers[0])


def open_verified(root: Path, capacity_bytes: int) -> ChecksumLayer:
    """The directory as all these processes open it, start-up work done."""
    backend = FileBackend(FileConfig(root, capacity_bytes, direct="off", threads=1))
    assert backend.wait_ready(60)
    return ChecksumLayer(backend, NAMESPACE)


def say(value: object) -> None:
    """One line of JSON."""
    print(json.dumps(value), flush=True)


def die_between_write_and_rename(backend: ChecksumLayer, first: int, count: int) -> None:
    """Puts objects and is killed when their temporary files are written."""
    numbers = list(range(first, first + count))

    def guard() -> NDArray[np.bool_]:
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError("still alive")

    backend.put_from(ids_of(numbers), pages_of(numbers).segments(), guard)


def die_while_naming(backend: ChecksumLayer, first: int, count: int) -> None:
    """Puts objects and is killed when they have their names, which the index does not know yet."""

    def publish(*_: object) -> NoReturn:
        named(*_)
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError("still alive")

    named, FileIo.publish = FileIo.publish, publish  # type: ignore[method-assign]
    numbers = list(range(first, first + count))
    backend.put_from(ids_of(numbers), pages_of(numbers).segments())


def die_again_and_again(root: Path, capacity_bytes: int, attempts: int, count: int) -> None:
    """As many processes in turn as `attempts`, each of which opens the directory and dies as above, with other objects.

    Says how many temporary files lie there after each.
    """
    for attempt in range(attempts):
        child = os.fork()  # nothing is open and no thread runs yet
        if child == 0:
            die_between_write_and_rename(open_verified(root, capacity_bytes), attempt * count, count)
        _, status = os.waitpid(child, 0)
        assert os.waitstatus_to_exitcode(status) == -signal.SIGKILL
        say(len(list(root.glob("??/*.tmp"))))


def hold_between_write_and_rename(backend: ChecksumLayer, first: int, count: int) -> None:
    """Puts objects; says `written` and waits for a line when their temporary files are there; says the outcomes."""
    numbers = list(range(first, first + count))

    def guard() -> NDArray[np.bool_]:
        say("written")
        sys.stdin.readline()
        return np.ones(count, dtype=np.bool_)

    say(backend.put_from(ids_of(numbers), pages_of(numbers).segments(), guard).tolist())


def write(backend: ChecksumLayer, first: int, count: int) -> None:
    """Puts objects one by one; says how often each outcome came."""
    outcomes: Counter[str] = Counter()
    for number in range(first, first + count):
        result = backend.put_from(ids_of([number]), pages_of([number]).segments())
        outcomes[Outcome(int(result[0])).name] += 1
    say(outcomes)


def read(backend: ChecksumLayer, first: int, count: int) -> None:
    """Says `reading`, reads objects over and over until stdin ends; says how often each outcome came."""
    numbers = list(range(first, first + count))
    ids, pages, target = ids_of(numbers), pages_of(numbers), Buffers.make(count, PAGE_BYTES)
    outcomes: Counter[str] = Counter()
    watch = selectors.DefaultSelector()
    watch.register(sys.stdin, selectors.EVENT_READ)
    say("reading")
    while not watch.select(timeout=0):
        result = backend.get_into(ids, target.segments())
        outcomes.update(Outcome(int(code)).name for code in result)
        for row in np.flatnonzero(result == Outcome.OK):
            if not np.array_equal(target.rows[row], pages.rows[row]):
                outcomes["OK with other bytes"] += 1
    say(outcomes)


COMMANDS = {
    function.__name__: function
    for function in (die_between_write_and_rename, die_while_naming, hold_between_write_and_rename, write, read)
}


def main(command: str, root: str, capacity_bytes: str, first: str, count: str) -> None:
    """Open, run one command, close."""
    if command == die_again_and_again.__name__:
        die_again_and_again(Path(root), int(capacity_bytes), int(first), int(count))
        return
    backend = open_verified(Path(root), int(capacity_bytes))
    COMMANDS[command](backend, int(first), int(count))
    backend.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
