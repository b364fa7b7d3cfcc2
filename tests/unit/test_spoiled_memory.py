"""Memory that a client has spoiled ends no call of ours in a SIGBUS, whoever touches it: backends least of all."""

import os

import numpy as np
import pytest
from cachekernels.pages import object_ids
from cachekernels.spoiled_memory import MemoryFault, gather, scatter

from storage_backends.base import Outcome, Segments
from storage_backends.layers.checksum import ChecksumLayer
from storage_backends.layers.stack import LayerOptions, in_layers
from storage_backends.memory.backend import MemoryBackend
from storage_backends.memory.config import MemoryConfig
from storage_backends.redis.backend import RedisBackend
from storage_backends.redis.config import RedisConfig
from storage_backends.registry import open_backend
from storage_backends.segment_views import fill, starts_alike, taken, views
from tests.helpers.lost_memory import LostMemory
from tests.helpers.redis_servers import fresh_prefix
from tests.oracles.pages import IDENTITY, chain

IDS = object_ids(chain(1, 1))
OBJECT_BYTES = 8192
SPLITS = [5000, 4096]  # where the memory of an object goes on elsewhere: in the middle of a page, and between two


@pytest.fixture
def lost():
    with LostMemory() as memory:
        yield memory


def of(*ranges):
    """Segments of one object: (address, bytes) of each range."""
    addresses, lengths = np.array(ranges, np.uint64).T.copy()
    return Segments(addresses, lengths, np.array([0, len(ranges)], np.int64), None)


def whole(size):
    row = np.random.default_rng(size).integers(0, 256, size, dtype=np.uint8)
    return row, (row.ctypes.data, size)


def test_ranges_are_gathered_and_scattered_whole():
    row, _ = whole(1000)
    address = row.ctypes.data
    addresses, lengths = np.array([address + 600, address], np.uint64), np.array([400, 600], np.uint64)
    assert gather(addresses, lengths) == row[600:].tobytes() + row[:600].tobytes()
    target = np.zeros(1000, np.uint8)
    places = np.array([target.ctypes.data + 600, target.ctypes.data], np.uint64)
    scatter(gather(addresses, lengths), places, lengths)
    assert (target == row).all()
    with pytest.raises(ValueError, match="10 bytes for ranges of 1000"):
        scatter(bytes(10), places, lengths)


def test_lost_ranges_are_an_error(lost):
    row, place = whole(100)
    addresses, lengths = np.array([place[0], lost.address], np.uint64), np.array([100, 100], np.uint64)
    with pytest.raises(MemoryFault):
        gather(addresses, lengths)
    with pytest.raises(MemoryFault):
        scatter(bytes(200), addresses, lengths)
    assert not row.any(), "what was not lost has been written"


def test_views_are_copied_under_the_guard(lost):
    row, place = whole(100)
    segments = of(place, (lost.address, 50))
    with pytest.raises(MemoryFault):
        taken(segments, 0)
    with pytest.raises(MemoryFault):
        fill(views(segments, 0), bytes(150))
    with pytest.raises(MemoryFault):
        starts_alike(views(segments, 0), bytes(150))
    assert taken(of(place), 0) == row.tobytes()


@pytest.mark.parametrize("length", [0, 60, 100, 130, 150, 200])
def test_fill_takes_what_fits(length):
    row, (address, _) = whole(150)
    row[:] = 0
    value = bytes(range(1, length + 1))
    assert fill(views(of((address, 100), (address + 100, 50)), 0), value) == (length == 150)
    fits = min(length, 150)
    assert row.tobytes() == value[:fits] + bytes(150 - fits)
    assert starts_alike(views(of((address, 100)), 0), value)


@pytest.fixture(params=["memory", "file", "file with O_DIRECT"])
def backend(request, tmp_path):
    kind, _, direct = request.param.partition(" with ")
    options = {"path": str(tmp_path), "capacity_bytes": "64 MiB"} if kind == "file" else {}
    if kind == "file":
        options["direct"] = "auto" if direct else "off"
    opened = open_backend(kind, options)
    while not opened.knows_all():  # it takes no writes while it scans
        os.sched_yield()
    yield opened
    opened.close()


def answer(call):
    """The outcome, FAILED for an OSError instead, which is what a tier makes of it."""
    try:
        return Outcome(int(call()[0]))
    except OSError:
        return Outcome.FAILED


@pytest.mark.parametrize("split", SPLITS)
def test_a_backend_survives_memory_that_is_gone(backend, lost, split):
    row, (address, size) = whole(OBJECT_BYTES)
    spoiled = of((address, split), (lost.address + split % 4096, size - split))
    assert answer(lambda: backend.put_from(IDS, spoiled)) > Outcome.EXISTS
    assert backend.contains(IDS).tolist() == [Outcome.MISS]
    assert backend.put_from(IDS, of((address, size))).tolist() == [Outcome.OK]
    before = row.tobytes()
    assert answer(lambda: backend.get_into(IDS, spoiled)) > Outcome.EXISTS
    answer(lambda: backend.set_aside(IDS, spoiled))
    row[:] = 0
    assert backend.get_into(IDS, of((address, size))).tolist() == [Outcome.OK]
    assert row.tobytes() == before


@pytest.mark.parametrize("split", SPLITS)
def test_layers_survive_it_and_do_not_blame_the_medium(lost, split):
    """Whoever has good memory is served all the while: one failure would open the circuit."""
    row, (address, size) = whole(OBJECT_BYTES)
    good, spoiled = of((address, size)), of((address, split), (lost.address + split % 4096, size - split))
    layered = in_layers(MemoryBackend(MemoryConfig()), LayerOptions(breaker_failures=1))
    assert answer(lambda: layered.put_from(IDS, spoiled)) > Outcome.EXISTS
    assert layered.put_from(IDS, good).tolist() == [Outcome.OK]
    before = row.tobytes()
    for _ in range(3):
        row[:] = 0
        assert answer(lambda: layered.get_into(IDS, spoiled)) > Outcome.EXISTS
        assert layered.get_into(IDS, good).tolist() == [Outcome.OK]
        assert row.tobytes() == before
    layered.close()


def test_what_arrived_in_layers_is_copied_where_it_is_wanted(lost):
    """Of a batch with misses, each hit to its own place, and nothing anywhere else."""
    ids, rows = object_ids(chain(1, 6)), np.arange(6 * 4096, dtype=np.int64).astype(np.uint8).reshape(6, 4096)
    layered = in_layers(MemoryBackend(MemoryConfig()), LayerOptions())
    stored = np.array([0, 1, 3, 5])
    layered.put_from(ids[stored], Segments.of_rows(rows[stored].copy()))
    target = np.full_like(rows, 7)
    parts = [(target.ctypes.data + 4096 * i + at, size) for i in range(6) for at, size in ((0, 1000), (1000, 3096))]
    addresses, lengths = np.array(parts, np.uint64).T.copy()
    segments = Segments(addresses, lengths, np.arange(0, 13, 2), target)
    found = layered.get_into(ids, segments)
    assert np.flatnonzero(found == Outcome.OK).tolist() == stored.tolist()
    assert (target[stored] == rows[stored]).all() and (target[[2, 4]] == 7).all()
    layered.close()


def test_a_server_is_not_to_blame_for_it(lost, valkey_server):
    row, (address, size) = whole(OBJECT_BYTES)
    good, spoiled = of((address, size)), of((address, 4096), (lost.address, size - 4096))
    backend = RedisBackend(RedisConfig.parse({"url": valkey_server.unix_url, "prefix": fresh_prefix()}))
    with pytest.raises(MemoryFault):
        backend.put_from(IDS, spoiled)
    assert backend.put_from(IDS, good).tolist() == [Outcome.OK]
    before = row.tobytes()
    with pytest.raises(MemoryFault):
        backend.get_into(IDS, spoiled)
    row[:] = 0
    assert backend.get_into(IDS, good).tolist() == [Outcome.OK]
    assert row.tobytes() == before
    backend.close()


def test_a_checksum_over_memory_that_is_gone_is_an_error(backend, lost):
    layer = ChecksumLayer(backend, IDENTITY.namespace())
    assert answer(lambda: layer.put_from(IDS, of((lost.address, 4096)))) > Outcome.EXISTS
    assert layer.contains(IDS).tolist() == [Outcome.MISS]
