"""Workers of a node in the hands of a test: slices that store run until the tiers are to write, and wait there."""

import queue
import threading

import numpy as np

from tests.oracles.pages import HANG_S, run_all


class Held:
    """A slice with a worker, at the moment when the tiers are to write it. `keys`: list of 32 numbers for each page."""

    def __init__(self, ids):
        self.keys = ids[:, :32].tolist()
        self.thread = threading.current_thread()
        self._answer = None
        self._is_over = threading.Event()

    def end(self, answer=None):
        """The tiers write it; or do not, and answer with these outcomes, or raise this error. A function: they write
        it, and answer with what it makes of their outcomes."""
        self._answer = answer
        self._is_over.set()
        self.thread.join(HANG_S)
        assert not self.thread.is_alive(), "a slice did not end"

    def answer(self):
        assert self._is_over.wait(HANG_S), "nobody ended a slice"
        if isinstance(self._answer, Exception):
            raise self._answer
        return self._answer


class HeldSlices:
    """For a node made with manual=True; slices may run at the same time, on threads of the test."""

    def __init__(self, node, monkeypatch):
        self._node = node
        self._write = node._parts.tiers.write
        self._begun = {}  # by thread: a queue with the slice, or None if it came to its end without a write
        monkeypatch.setattr(node._parts.tiers, "write", self._hold)
        monkeypatch.setattr(node._parts.pool, "_max_running_stores", 8)

    def begin(self):
        """A worker takes the next slice, and has it until the test ends it. None: it writes nothing."""
        begun = queue.Queue()

        def work():
            self._begun[threading.current_thread()] = begun
            self._node.run_one()
            begun.put(None)

        threading.Thread(target=work, daemon=True).start()
        return begun.get(timeout=HANG_S)

    def run_all(self):
        """All that can be done now, each slice to its end."""
        run_all(self._node)

    def _hold(self, namespace, ids, segments, guard):
        begun = self._begun.get(threading.current_thread())
        answer = None
        if begun is not None:
            held = Held(ids)
            begun.put(held)
            answer = held.answer()
        if answer is None or callable(answer):
            results = self._write(namespace, ids, segments, guard)
            return results if answer is None else answer(results)
        return np.array(answer, np.uint8)
