"""Waiting for what nobody tells."""

from __future__ import annotations

import threading
from collections.abc import Callable


def until(holds: Callable[[], object]) -> None:
    """Passes once another process or thread has come that far; the test's own time-out bounds it."""
    moment = threading.Event()
    while not holds():
        moment.wait(0.005)
