"""Threads, descriptors and temporary files: none is left, whatever failed."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from storage_backends.base import Outcome, Outcomes
from storage_backends.errors import StorageClosed
from storage_backends.testing.objects import Buffers, make_ids, open_descriptors
from tests.fault.file_backend.objects import (
    OBJECT_BYTES,
    below,
    opened,
    path_of,
)
from tests.helpers.resources import growth, resources


class TestResources:
    def test_descriptors_constant_over_many_failing_calls(self, tmp_path: Path) -> None:
        """Ten thousand objects put and read, with every kind of failure that can be had on one directory."""
        batch, steps = 20, 250
        random = np.random.default_rng(1)
        pages, target = Buffers.make(batch, OBJECT_BYTES, seed=1), Buffers.make(batch, OBJECT_BYTES)
        longer = Buffers.make(batch, OBJECT_BYTES + 4096)
        pool = make_ids(3 * batch)
        in_the_way = path_of(tmp_path, pool[0])
        in_the_way.mkdir(parents=True)
        outcomes: set[int] = set()
        with opened(tmp_path, capacity_bytes=batch * OBJECT_BYTES, direct="off") as backend:
            before = open_descriptors()
            for _ in range(steps):
                ids = np.ascontiguousarray(pool[random.choice(len(pool), batch, replace=False)])
                good = random.random(batch) < 0.7
                for _ in range(2):
                    outcomes |= set(backend.put_from(ids, pages.segments(), lambda good=good: good).tolist())
                for object_id in ids[:2]:
                    if not path_of(tmp_path, object_id).is_dir():
                        path_of(tmp_path, object_id).unlink(missing_ok=True)
                into = longer if random.random() < 0.2 else target
                outcomes |= set(backend.get_into(ids, into.segments()).tolist())
                with pytest.raises(LookupError):
                    backend.put_from(make_ids(batch, seed=2), pages.segments(), raise_lookup_error)
            assert open_descriptors() <= before
            assert below(tmp_path, "??/*.tmp") == []
            assert backend.usage().reserved_bytes == 0
        expected = {Outcome.OK, Outcome.EXISTS, Outcome.MISS, Outcome.CORRUPT, Outcome.CHANGED, Outcome.FAILED}
        assert outcomes == expected

    def test_threads_and_descriptors_constant_over_openings(self, tmp_path: Path) -> None:
        with opened(tmp_path):
            pass
        before = resources()
        for _ in range(50):
            with opened(tmp_path) as backend:
                backend.contains(make_ids(1))
        assert growth(before) == []
        assert os.listdir(tmp_path / "writers") == []

    def test_what_is_asked_when_it_has_been_closed_touches_no_memory_that_is_gone(self, tmp_path: Path) -> None:
        """A put that has just ended asks whether the count is still there, and somebody has closed meanwhile."""
        with opened(tmp_path) as backend:
            ids, pages = make_ids(1), Buffers.make(1, OBJECT_BYTES, seed=1)
            put, closing_it = backend._current.put_from, backend.close

            def closed_on_the_way(*asked: object) -> Outcomes:
                result = put(*asked)  # type: ignore[arg-type]
                closing_it()
                return result

            backend._current.put_from = closed_on_the_way  # type: ignore[method-assign]
            assert backend.put_from(ids, pages.segments()).tolist() == [Outcome.OK]
            assert not backend.knows_all()
            backend.touch(ids)

    def test_close_waits_for_calls_under_way(self, tmp_path: Path) -> None:
        order: list[str] = []
        writing, go_on = threading.Event(), threading.Event()
        with opened(tmp_path) as backend:

            def guard() -> NDArray[np.bool_]:
                writing.set()
                assert go_on.wait(60)
                order.append("put ends")
                return np.ones(1, dtype=np.bool_)

            def close() -> None:
                backend.close()
                order.append("closed")

            source = Buffers.make(1, OBJECT_BYTES, seed=1).segments()
            putting = threading.Thread(target=backend.put_from, args=(make_ids(1), source, guard))
            closing = threading.Thread(target=close)
            putting.start()
            assert writing.wait(60)
            closing.start()
            refused = False
            while not refused:  # close has begun once other calls are refused
                try:
                    backend.contains(make_ids(1))
                except StorageClosed:
                    refused = True
            go_on.set()
            putting.join()
            closing.join()
        assert order == ["put ends", "closed"]
        assert len(below(tmp_path, "??/*.page")) == 1


def raise_lookup_error() -> NDArray[np.bool_]:
    raise LookupError("from the guard")
