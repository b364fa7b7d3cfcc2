"""The layers over a backend: counts, faults on purpose, checksums."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from storage_backends.base import Outcome, Segments, StorageBackend
from storage_backends.errors import StorageUnavailable
from storage_backends.layers.checksum import ChecksumLayer
from storage_backends.layers.fault import Answer, Delay, Draw, FaultLayer, Flip, Plan, Raise, Script, Tear
from storage_backends.layers.metrics import OPERATIONS, MetricsLayer
from storage_backends.memory.backend import MemoryBackend
from storage_backends.memory.config import MemoryConfig
from storage_backends.testing.objects import Buffers, make_ids

NAMESPACE = bytes(range(32))
SIZE = 8192


@pytest.fixture
def memory() -> Iterator[MemoryBackend]:
    backend = MemoryBackend(MemoryConfig(2**20))
    yield backend
    backend.close()


class Clock:
    """Seconds that pass only when a test lets them."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now

    def wait(self, seconds: float) -> None:
        self.now += seconds


class TestMetrics:
    def test_every_label_is_there_from_the_start(self, memory: MemoryBackend) -> None:
        counts = MetricsLayer(memory).counts()
        assert set(counts.objects) == {(operation, outcome) for operation in OPERATIONS for outcome in Outcome}
        assert set(counts.objects.values()) == {0}
        assert counts.bytes == {"get": 0, "put": 0}
        assert counts.calls == dict.fromkeys(OPERATIONS, 0)
        assert counts.errors == {}

    def test_counts_objects_bytes_calls_and_seconds(self, memory: MemoryBackend) -> None:
        clock = Clock()
        layer = MetricsLayer(FaultLayer(memory, Script({"get": [Delay(2.5)]}), clock.wait), clock)
        ids, pages = make_ids(4), Buffers.make(4, SIZE, seed=1)
        layer.put_from(ids[:3].copy(), pages.take(slice(0, 3)).segments(), lambda: np.array([True, True, False]))
        layer.get_into(ids, pages.segments())
        layer.contains(ids)
        layer.set_aside(ids[:1].copy(), pages.take(slice(0, 1)).segments())
        layer.delete(ids)
        counts = layer.counts()
        assert {key: value for key, value in counts.objects.items() if value} == {
            ("put", Outcome.OK): 2,
            ("put", Outcome.CHANGED): 1,
            ("get", Outcome.OK): 2,
            ("get", Outcome.MISS): 2,
            ("contains", Outcome.OK): 2,
            ("contains", Outcome.MISS): 2,
            ("set_aside", Outcome.OK): 1,
            ("delete", Outcome.OK): 1,
            ("delete", Outcome.MISS): 3,
        }
        assert counts.bytes == {"get": 2 * SIZE, "put": 2 * SIZE}
        assert counts.calls == dict.fromkeys(OPERATIONS, 1)
        assert counts.seconds == {**dict.fromkeys(OPERATIONS, 0.0), "get": 2.5}

    def test_counts_calls_that_raise(self, memory: MemoryBackend) -> None:
        script = Script({"put": [Raise(StorageUnavailable("away")), Raise(OSError(5, "io"))]})
        layer = MetricsLayer(FaultLayer(memory, script, Clock().wait))
        for kind in (StorageUnavailable, OSError):
            with pytest.raises(kind):
                layer.put_from(make_ids(1), Buffers.make(1, SIZE).segments())
        assert layer.counts().errors == {("put", "StorageUnavailable"): 1, ("put", "OSError"): 1}
        assert layer.counts().calls["put"] == 2


class TestFaults:
    def layer(self, memory: StorageBackend, plan: Plan) -> FaultLayer:
        return FaultLayer(memory, plan, Clock().wait)

    def test_script_runs_out_per_operation(self, memory: MemoryBackend) -> None:
        script = Script()
        script.add("contains", Answer(Outcome.TIMEOUT), Answer(Outcome.UNAVAILABLE))
        layer, ids = self.layer(memory, script), make_ids(2)
        assert layer.delete(ids).tolist() == [Outcome.MISS] * 2
        assert [layer.contains(ids)[0] for _ in range(3)] == [Outcome.TIMEOUT, Outcome.UNAVAILABLE, Outcome.MISS]

    def test_torn_put_claims_success(self, memory: MemoryBackend) -> None:
        layer, ids, pages = self.layer(memory, Script({"put": [Tear(100)]})), make_ids(2), Buffers.make(2, SIZE, seed=1)
        assert layer.put_from(ids, pages.segments()).tolist() == [Outcome.OK] * 2
        assert layer.sizes(ids).tolist() == [100] * 2

    @pytest.mark.parametrize("on_read", [False, True])
    def test_one_flipped_bit(self, memory: MemoryBackend, on_read: bool) -> None:
        fault = Flip(byte=5000, on_read=on_read)
        layer = self.layer(memory, Script({"get" if on_read else "put": [fault]}))
        ids, pages, target = make_ids(2), Buffers.make(2, SIZE, seed=1), Buffers.make(2, SIZE)
        layer.put_from(ids, pages.segments(cuts=[100]))
        layer.get_into(ids, target.segments(cuts=[1000, 4000]))
        different = target.rows ^ pages.rows
        assert (different[:, 5000] == 1).all()
        assert different.sum() == 2

    def test_draw_is_the_same_for_the_same_seed(self) -> None:
        def draws(seed: int) -> list[object]:
            plan = Draw(seed, 0.5, [Answer(Outcome.FAILED), Answer(Outcome.TIMEOUT)], ["get"])
            return [plan("get") for _ in range(50)]

        assert draws(1) == draws(1) != draws(2)
        assert 10 < draws(1).count(None) < 40
        assert Draw(1, 1.0, [Answer(Outcome.FAILED)], ["get"])("put") is None


class TestChecksum:
    def test_torn_put_is_found_by_the_reader(self, memory: MemoryBackend) -> None:
        layer = ChecksumLayer(FaultLayer(memory, Script({"put": [Tear(5000)]}), Clock().wait), NAMESPACE)
        ids, pages = make_ids(2), Buffers.make(2, SIZE, seed=1)
        assert layer.put_from(ids, pages.segments()).tolist() == [Outcome.OK] * 2
        assert layer.get_into(ids, pages.segments()).tolist() == [Outcome.CORRUPT] * 2
        assert layer.contains(ids).tolist() == [Outcome.MISS] * 2

    def test_read_twice_before_it_is_called_corrupt(self, memory: MemoryBackend) -> None:
        """Once: a good page. Twice: corrupt, but the medium holds a good object, so nothing is set aside."""
        ids, pages, target = make_ids(1), Buffers.make(1, SIZE, seed=1), Buffers.make(1, SIZE)
        script = Script()
        layer = ChecksumLayer(FaultLayer(memory, script, Clock().wait), NAMESPACE)
        layer.put_from(ids, pages.segments())
        flip = Flip(byte=4000, on_read=True)
        script.add("get", flip)
        assert layer.get_into(ids, target.segments()).tolist() == [Outcome.OK]
        assert np.array_equal(target.rows, pages.rows)
        script.add("get", flip, flip)
        assert layer.get_into(ids, target.segments()).tolist() == [Outcome.CORRUPT]
        assert layer.contains(ids).tolist() == [Outcome.OK]
        assert layer.get_into(ids, target.segments()).tolist() == [Outcome.OK]

    def test_gone_at_the_second_look_is_a_miss(self, memory: MemoryBackend) -> None:
        ids, pages = make_ids(1), Buffers.make(1, SIZE, seed=1)
        script = Script()
        layer = ChecksumLayer(FaultLayer(memory, script, Clock().wait), NAMESPACE)
        layer.put_from(ids, pages.segments())
        script.add("get", Flip(byte=4000, on_read=True), Answer(Outcome.MISS))
        assert layer.get_into(ids, pages.segments()).tolist() == [Outcome.MISS]

    @pytest.mark.parametrize("outcome", [Outcome.TIMEOUT, Outcome.UNAVAILABLE, Outcome.FAILED, Outcome.CANCELLED])
    def test_other_outcomes_pass_through(self, memory: MemoryBackend, outcome: Outcome) -> None:
        plan = Script({"get": [Answer(outcome)], "put": [Answer(outcome)]})
        layer, segments = (
            ChecksumLayer(FaultLayer(memory, plan, Clock().wait), NAMESPACE),
            Buffers.make(2, SIZE).segments(),
        )
        assert layer.put_from(make_ids(2), segments).tolist() == [outcome] * 2
        assert layer.get_into(make_ids(2), segments).tolist() == [outcome] * 2

    def test_another_namespace_reads_nothing(self, memory: MemoryBackend) -> None:
        ids, pages = make_ids(1), Buffers.make(1, SIZE, seed=1)
        ChecksumLayer(memory, NAMESPACE).put_from(ids, pages.segments())
        assert ChecksumLayer(memory, bytes(32)).get_into(ids, pages.segments()).tolist() == [Outcome.CORRUPT]

    def test_set_aside_judges_for_itself(self, memory: MemoryBackend) -> None:
        layer, ids, pages = ChecksumLayer(memory, NAMESPACE), make_ids(3), Buffers.make(3, SIZE, seed=1)
        layer.put_from(ids[:1].copy(), pages.take(slice(0, 1)).segments())
        memory.put_from(ids[1:2].copy(), Buffers.make(1, SIZE + 128, seed=2).segments())
        assert layer.set_aside(ids, pages.segments()).tolist() == [Outcome.CHANGED, Outcome.CHANGED, Outcome.MISS]
        memory.delete(ids[1:2].copy())
        memory.put_from(ids[1:2].copy(), Segments.of_rows(np.zeros((1, SIZE + 128), dtype=np.uint8)))
        assert layer.set_aside(ids, pages.segments()).tolist() == [Outcome.CHANGED, Outcome.OK, Outcome.MISS]

    def test_payloads_must_be_whole_and_alike(self, memory: MemoryBackend) -> None:
        layer, ids, pages = ChecksumLayer(memory, NAMESPACE), make_ids(2), Buffers.make(2, SIZE)
        with pytest.raises(ValueError, match="one segment for each"):
            layer.put_from(ids, pages.segments(cuts=[100]))
        unlike = pages.segments()
        unlike.lengths[1] = 100
        with pytest.raises(ValueError, match="payloads of one length"):
            layer.get_into(ids, unlike)


class TestSegments:
    def test_lengths_and_choice(self) -> None:
        rows = Buffers.make(3, SIZE)
        segments = rows.segments(cuts=[10, 100])
        assert segments.object_lengths().tolist() == [SIZE] * 3
        assert len(segments) == 3
        chosen = segments.take(np.array([2, 0]))
        assert chosen.offsets.tolist() == [0, 3, 6]
        assert chosen.addresses.tolist() == [*segments.addresses[6:9], *segments.addresses[0:3]]
        assert chosen.object_lengths().tolist() == [SIZE] * 2
        assert len(segments.take(np.zeros(0, dtype=np.intp))) == 0

    def test_rows(self) -> None:
        rows = np.zeros((2, 5), dtype=np.uint8)
        segments = Segments.of_rows(rows)
        assert segments.addresses.tolist() == [rows.ctypes.data, rows.ctypes.data + 5]
        assert segments.owner is rows
        with pytest.raises(ValueError, match="C-contiguous"):
            Segments.of_rows(rows[:, ::2])
