"""Processes that are killed in one step of a put or of a start: `python -m tests.helpers.storage_steps`.

A line of stdin, JSON, names a backend and its options, a step, and whether the process dies before it, after it, or,
where the step is done for several objects at once, in the middle. Says how that process has ended. Each is a fork of
this one, which has nothing open and no threads, so that hundreds of them cost little.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable, Mapping
from contextlib import closing

import numpy as np
from cachekernels.files import FileIo
from cachekernels.objects import ObjectIndex
from numpy.typing import NDArray

from storage_backends.file.directory import ObjectDirectory
from storage_backends.file.writers import Writers
from storage_backends.registry import open_backend
from tests.helpers.storage_child import ids_of, whole_pages_of

PUT_STEPS: Mapping[str, type] = {
    "reserve": ObjectIndex,
    "reuse": FileIo,
    "remove": FileIo,
    "settle": ObjectIndex,
    "_write": ObjectDirectory,
    "name": ObjectIndex,
    "publish": FileIo,
    "commit": ObjectIndex,
}
START_STEPS: Mapping[str, type] = {
    "join": Writers,
    "join_count": ObjectIndex,
    "others_alive": Writers,
    "add_scanned": ObjectIndex,
    "remove_stale": Writers,
    "end_scan": ObjectIndex,
    "bury": Writers,
    "_end_place": Writers,
    "give_back": ObjectIndex,
    "end_turn": Writers,
}
HALVED = ("reuse", "publish")
"""Steps that go object by object; each argument is an array of them."""
COUNT = 3
"""Objects of a put."""


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("still alive")


def die_at(step: str, when: str) -> None:
    """This process is killed when it comes to the step."""
    owner = {**PUT_STEPS, **START_STEPS}[step]
    original: Callable[..., object] = getattr(owner, step)

    def killed(*args: object, **kwargs: object) -> None:
        if when == "middle":
            args = (args[0], *(_first(each) for each in args[1:]))
        if when != "before":
            original(*args, **kwargs)
        die()

    setattr(owner, step, killed)


def _first(rows: object) -> NDArray[np.generic]:
    assert isinstance(rows, np.ndarray)
    return np.ascontiguousarray(rows[:1])


def live(backend: str, options: Mapping[str, object], step: str, when: str, first: int) -> None:
    """Opens the directory, puts objects from number `first` on, and dies on the way."""
    if step in START_STEPS:
        die_at(step, when)
    with closing(open_backend(backend, options)) as opened:
        assert opened.wait_ready(60)
        if step in PUT_STEPS:
            die_at(step, when)
        numbers = list(range(first, first + COUNT))
        opened.put_from(ids_of(numbers), whole_pages_of(numbers).segments())


def main() -> None:
    """One process after the other, as told."""
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            try:
                live(*json.loads(line))
            finally:
                os._exit(1)
        _, status = os.waitpid(child, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)


if __name__ == "__main__":
    main()
