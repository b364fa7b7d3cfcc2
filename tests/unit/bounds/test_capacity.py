"""A limit by room: what counts, what leaves, and what is not known yet."""

from __future__ import annotations

import threading
from contextlib import closing

import numpy as np
import pytest

from storage_backends.base import (
    ObjectIds,
    Outcome,
    Outcomes,
)
from storage_backends.errors import StorageTimeout
from storage_backends.layers.capacity import CapacityLayer
from storage_backends.layers.checksum import ChecksumLayer
from storage_backends.layers.fault import Answer, FaultLayer, Raise, Script
from storage_backends.layers.passing import PassingLayer
from storage_backends.testing.objects import Buffers, make_ids
from tests.helpers.waiting import until
from tests.unit.bounds.media import HANG_S, SIZE, Medium, bounded, put


class TestCapacity:
    def test_what_was_there_before_counts_and_leaves_first(self, medium: Medium) -> None:
        old = put(medium, 6, seed=1)
        with closing(bounded(medium, 8)) as layer:
            assert layer.usage().used_bytes == 6 * SIZE
            new = put(layer, 4, seed=2)
            assert medium.memory.usage().used_bytes == layer.usage().used_bytes == 8 * SIZE
            assert (layer.contains(new) == Outcome.OK).all()
            assert np.count_nonzero(layer.contains(old) == Outcome.OK) == 4

    def test_a_start_over_the_limit_comes_down_to_it(self, medium: Medium) -> None:
        put(medium, 12, seed=1)
        with closing(bounded(medium, 8)):
            assert medium.memory.usage().objects == 8

    def test_until_it_has_been_counted_reads_pass_and_puts_wait(self, medium: Medium) -> None:
        old = put(medium, 2, seed=1)
        medium.may_scan.clear()
        with closing(CapacityLayer(medium, 8 * SIZE)) as layer:
            target = Buffers.make(2, SIZE)
            assert (layer.get_into(old, target.segments()) == Outcome.OK).all()
            refused = layer.put_from(make_ids(2, 2), target.segments())
            assert (refused == Outcome.THROTTLED).all()
            assert medium.memory.usage().objects == 2
            medium.may_scan.set()
            assert layer.wait_ready(HANG_S)
            put(layer, 2, seed=2)

    def test_a_listing_that_fails_is_begun_again_and_counts_once(self, medium: Medium) -> None:
        put(medium, 4, seed=1)
        medium.num_failing_scans = 3
        with closing(bounded(medium, 8)) as layer:
            assert medium.num_failing_scans == 0
            assert layer.usage().used_bytes == 4 * SIZE

    @pytest.mark.parametrize("fault", [Raise(StorageTimeout("late")), Answer(Outcome.TIMEOUT)])
    def test_an_answer_that_was_lost_takes_room_until_the_medium_was_asked(
        self, medium: Medium, fault: Raise | Answer
    ) -> None:
        script = Script()
        with closing(bounded(FaultLayer(medium, script, lambda _: None), 8)) as layer:
            ids, pages = make_ids(2, 1), Buffers.make(2, SIZE, 1)
            script.add("put", fault)
            if isinstance(fault, Raise):
                with pytest.raises(StorageTimeout):
                    layer.put_from(ids, pages.segments())
            else:
                assert (layer.put_from(ids, pages.segments()) == Outcome.TIMEOUT).all()
            assert (layer.get_into(ids, pages.segments()) == Outcome.MISS).all()
            until(lambda: layer.usage().used_bytes == 0)

    def test_a_victim_that_cannot_be_deleted_stays_counted_and_the_put_is_refused(self, medium: Medium) -> None:
        script = Script()
        with closing(bounded(FaultLayer(medium, script, lambda _: None), 4)) as layer:
            put(layer, 4, seed=1)
            script.add("delete", Answer(Outcome.UNAVAILABLE))
            refused = layer.put_from(make_ids(2, 2), Buffers.make(2, SIZE, 2).segments())
            assert (refused == Outcome.NO_SPACE).all()
            assert medium.memory.usage().used_bytes == layer.usage().used_bytes == 4 * SIZE
            put(layer, 2, seed=2)
            assert medium.memory.usage().used_bytes == layer.usage().used_bytes == 4 * SIZE

    def test_a_removal_that_takes_effect_after_all_makes_room(self, medium: Medium) -> None:
        """Without anybody who asks for what has gone."""

        class SlowToRemove(PassingLayer):
            late: ObjectIds | None = None

            def delete(self, ids: ObjectIds) -> Outcomes:
                self.late = ids.copy()
                raise StorageTimeout("late")

            def is_settled(self) -> bool:
                return self.late is None

        slow = SlowToRemove(medium)
        with closing(bounded(slow, 4)) as layer:
            put(layer, 4, seed=1)
            with pytest.raises(StorageTimeout):
                layer.put_from(make_ids(2, 2), Buffers.make(2, SIZE, 2).segments())
            assert slow.late is not None and len(slow.late) == 2
            medium.delete(slow.late)
            assert layer.usage().used_bytes == 4 * SIZE
            slow.late = None
            until(lambda: layer.usage().used_bytes == 2 * SIZE)
            put(layer, 2, seed=2)

    def test_never_over_the_limit_while_many_write(self, medium: Medium) -> None:
        most = 0

        class Watched(PassingLayer):
            def put_from(self, *args: object) -> np.ndarray:  # type: ignore[override]
                nonlocal most
                result = self.inner.put_from(*args)  # type: ignore[arg-type]
                most = max(most, medium.memory.usage().used_bytes)
                return result

        with closing(bounded(Watched(medium), 16)) as layer:

            def write(seed: int) -> None:
                for round_ in range(30):
                    layer.put_from(make_ids(5, seed * 100 + round_), Buffers.make(5, SIZE, seed).segments())

            threads = [threading.Thread(target=write, args=(seed,)) for seed in range(4)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            layer._index.check()
            assert 8 * SIZE <= most <= 16 * SIZE
            assert medium.memory.usage().used_bytes == layer.usage().used_bytes

    def test_it_says_what_is_there_without_asking(self, medium: Medium) -> None:
        class Away(PassingLayer):
            def known(self, ids: ObjectIds) -> np.ndarray:
                return np.zeros(len(ids), np.bool_)

        old = put(medium, 2, seed=1)
        with closing(bounded(Away(medium), 8)) as layer:
            assert layer.known(np.concatenate([old, make_ids(1, 9)])).tolist() == [True, True, False]

    def test_where_it_makes_no_sense(self, medium: Medium) -> None:
        with pytest.raises(ValueError, match="memory backend has a capacity of its own"):
            CapacityLayer(medium.memory, 2**20)
        with pytest.raises(ValueError, match="below the checksum layer"):
            CapacityLayer(ChecksumLayer(medium, bytes(32)), 2**20)

    def test_closing_ends_a_listing_that_waits_for_its_next_try(self, medium: Medium) -> None:
        put(medium, 2, seed=1)
        medium.num_failing_scans = 1
        layer = CapacityLayer(medium, 8 * SIZE, retry_s=3600)
        layer.close()
        assert not layer._thread.is_alive()


def test_an_object_whose_first_answer_was_lost_counts_when_the_second_try_finds_it(medium: Medium) -> None:
    with closing(bounded(medium, 8)) as layer:
        ids = put(medium, 2, seed=1)  # on the medium, behind the layer's back
        assert layer.put_from(ids, Buffers.make(2, SIZE, 1).segments()).tolist() == [Outcome.EXISTS] * 2
        assert layer.usage().used_bytes == 2 * SIZE
