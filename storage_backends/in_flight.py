"""Calls in flight, so that closing waits for them and later ones are refused."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from storage_backends.errors import StorageClosed


class InFlight:
    """Counts the calls of one backend. `name` is the backend's, for the message."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._changed = threading.Condition()
        self._count = 0
        self._has_lone = False
        self._is_closed = False

    @contextmanager
    def call(self) -> Iterator[None]:
        """Around a call. Raises StorageClosed after `close`."""
        with self._changed:
            self._changed.wait_for(lambda: not self._has_lone)
            if self._is_closed:
                raise StorageClosed(f"the {self._name} backend was closed")
            self._count += 1
        try:
            yield
        finally:
            with self._changed:
                self._count -= 1
                self._changed.notify_all()

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Around what must not happen while a call runs: waits for those in flight, and later ones wait for it."""
        with self._changed:
            self._changed.wait_for(lambda: not self._has_lone)
            self._has_lone = True
            self._changed.wait_for(lambda: self._count == 0)
        try:
            yield
        finally:
            with self._changed:
                self._has_lone = False
                self._changed.notify_all()

    def shut(self) -> None:
        """Within `alone`: refuse further calls, those that wait for its end included."""
        with self._changed:
            self._is_closed = True

    def close(self) -> bool:
        """Refuse further calls and wait for those in flight. False: it was closed before."""
        with self._changed:
            if self._is_closed:
                return False
            self._is_closed = True
            self._changed.wait_for(lambda: self._count == 0)
            return True
