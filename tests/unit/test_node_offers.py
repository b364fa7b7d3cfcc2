"""What an engine may offer as its region, and what becomes of memory that is not there."""

import ctypes
import fcntl
import os
import socket
import struct

import numpy as np
import pytest
from cachekernels import region as regions
from cachekernels.region import Region, Side
from cachekernels.system_memory import AvailableMemory

from cachesvc.client.base import AttachRefused, AttachRequest
from cachesvc.client.greeting import new_hello
from cachesvc.node.hand_over import StillBusy
from cachesvc.node.node import Node
from cachesvc.node.parts import NodeOptions
from cachesvc.node.store_sessions import StoreRequest
from cachesvc.outcomes import AttachResult
from cachesvc.rpc import channel_pb2, codec
from cachesvc.rpc.framing import to_frame
from tests.helpers.channels import RawClient, RunningDoor, connected, readable
from tests.oracles.pages import HANG_S, IDENTITY, PAGE_BYTES, Engine, chain, indices

KEYS = chain(1, 4)
NUM_FRAMES = 8
HOLE = 0x02 | 0x01  # FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE
REGION_ID_AT = 16  # in the directory's header: behind magic, version and record size
DATA_INODE_AT = 64


@pytest.fixture
def node():
    options = NodeOptions(keep_regions_s=300.0, managed_bytes=1 << 20)
    with Node(options=options, manual=True) as node:
        yield node


@pytest.fixture
def mine():
    """A region that an engine made while there was no node."""
    region = Region.create(NUM_FRAMES, PAGE_BYTES)
    yield region
    region.close()


def offer(node, region, group="a", **more):
    return node.attach(AttachRequest(IDENTITY, group, region.num_frames, PAGE_BYTES, offer=region), **more)


def refusal(node, region):
    with pytest.raises(AttachRefused) as refused:
        offer(node, region)
    return refused.value.result


def punch(fd, offset, num_bytes):
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.fallocate(fd, HOLE, ctypes.c_long(offset), ctypes.c_long(num_bytes)) == 0


# Memory that is promised and not there


def test_memory_that_an_offer_lacks_is_allocated_and_its_pages_stay(node, mine):
    content = np.full(PAGE_BYTES, 7, np.uint8)
    assert mine.write(indices(0), np.array([content.ctypes.data], np.uint64), KEYS[:1], np.zeros(1, np.uint32)).all()
    punch(mine.data_fd, 2 * mine.stride_bytes, 4 * mine.stride_bytes)
    assert mine.missing_bytes() == 4 * mine.stride_bytes
    session = offer(node, mine)
    assert mine.missing_bytes() == 0
    assert node.counters.regions_allocated_bytes.value() == 4 * mine.stride_bytes
    assert session.has_pages
    assert (mine.data()[0, :PAGE_BYTES] == 7).all()


def test_a_region_without_any_memory_is_allocated_too(node):
    sparse = Region.create(NUM_FRAMES, PAGE_BYTES, touch_threads=0)
    assert sparse.missing_bytes() > 0
    offer(node, sparse)
    assert sparse.missing_bytes() == 0
    sparse.close()


def test_what_create_makes_lacks_nothing(mine):
    assert mine.missing_bytes() == 0


def test_an_offer_that_does_not_fit_is_refused_with_need_have_and_reserve(node, monkeypatch):
    sparse = Region.create(NUM_FRAMES, PAGE_BYTES, touch_threads=0)
    monkeypatch.setattr(regions, "available_memory", lambda: AvailableMemory(4096, 1024, "test"))
    with pytest.raises(AttachRefused, match=r"lacks memory: .*need .* have .* reserve") as refused:
        offer(node, sparse)
    assert refused.value.result is AttachResult.REFUSED_MEMORY
    assert sparse.missing_bytes() > 0, "nothing was taken"
    assert not sparse.is_held(Side.NODE)
    sparse.close()


def test_kept_regions_make_room_for_what_an_offer_lacks(node, monkeypatch):
    node.detach(node.attach(AttachRequest(IDENTITY, "old", NUM_FRAMES, PAGE_BYTES)))
    sparse = Region.create(NUM_FRAMES, PAGE_BYTES, touch_threads=0)
    answers = iter([AvailableMemory(0, 0, "test"), AvailableMemory(1 << 30, 0, "test")])
    monkeypatch.setattr(regions, "available_memory", lambda: next(answers))
    offer(node, sparse)
    assert node.counters.regions_dropped.value("memory") == 1
    sparse.close()


# Memory that is somebody else's


@pytest.fixture
def slab(node):
    session = node.managed.open(StoreRequest("t", "n", PAGE_BYTES, NUM_FRAMES * -(-PAGE_BYTES // 4096) * 4096))
    region = session.slab.region
    return Region.open(region.data_fd, region.directory_fd)


def test_a_slab_is_not_taken_for_an_engines_region(node, slab):
    assert refusal(node, slab) is AttachResult.REFUSED_REGION
    assert node.counters.attaches.value("refused_region") == 1


def test_nor_is_one_whose_client_wrote_another_id_into_it(node, slab):
    os.pwrite(slab.directory_fd, os.urandom(16), REGION_ID_AT)
    renamed = Region.open(slab.data_fd, slab.directory_fd)
    assert renamed.region_id != slab.region_id
    assert refusal(node, renamed) is AttachResult.REFUSED_REGION


def test_nor_is_one_with_a_directory_of_the_clients_own(node, slab, mine):
    os.pwrite(mine.directory_fd, struct.pack("<Q", os.fstat(slab.data_fd).st_ino), DATA_INODE_AT)
    assert refusal(node, Region.open(slab.data_fd, mine.directory_fd)) is AttachResult.REFUSED_REGION


def test_nor_is_an_engines_memory_with_another_directory(node, mine):
    theirs = node.attach(AttachRequest(IDENTITY, "b", NUM_FRAMES, PAGE_BYTES)).region
    os.pwrite(mine.directory_fd, struct.pack("<Q", os.fstat(theirs.data_fd).st_ino), DATA_INODE_AT)
    assert refusal(node, Region.open(theirs.data_fd, mine.directory_fd)) is AttachResult.REFUSED_REGION


def test_an_id_that_was_copied_gets_nobody_elses_region(node, mine):
    """A lost engine's, which is resumed by whoever offers it."""
    engine = Engine(node, "b", NUM_FRAMES)
    alive = Region.open(engine.region.data_fd, engine.region.directory_fd)
    alive.hold(Side.ENGINE)
    node.lost(engine.client._session)
    os.pwrite(mine.directory_fd, engine.region.region_id, REGION_ID_AT)
    impostor = Region.open(mine.data_fd, mine.directory_fd)
    assert impostor.region_id == engine.region.region_id
    session = offer(node, impostor)
    assert session.region.files == mine.files != engine.region.files
    assert node.registry.snapshot()['cachesvc_regions{state="lost"}'] == 1


# Offers that have to wait


@pytest.fixture
def locked(mine):
    """A region on whose directory somebody keeps a lock; the test may close the descriptor."""
    fd = os.open(f"/proc/self/fd/{mine.directory_fd}", os.O_RDWR)
    fcntl.flock(fd, fcntl.LOCK_EX)
    yield mine, fd


def test_who_does_not_wait_is_told_so_and_not_counted(node, locked):
    mine, fd = locked
    with pytest.raises(StillBusy, match="locked"):
        offer(node, mine, waits=False)
    assert node.counters.attaches.value("refused_busy") == 0
    os.close(fd)
    offer(node, mine, waits=False)


def test_offers_that_wait_hold_nobody_up(locked):
    mine, fd = locked
    request = AttachRequest(IDENTITY, "a", NUM_FRAMES, PAGE_BYTES, offer=mine)
    hello = new_hello()
    hello.attach.CopyFrom(codec.attach_message(request))
    with Node(options=NodeOptions(resume_wait_s=HANG_S)) as node, RunningDoor(node) as door:
        waiting = [connected(door.path) for _ in range(20)]
        for sock in waiting:
            socket.send_fds(sock, [to_frame(hello)], [mine.data_fd, mine.directory_fd])
            assert reply(sock).HasField("opening")
        with RawClient(door.path, "b"):
            assert not [sock for sock in waiting if readable(sock)], "none has been answered"
        os.close(fd)
        answers = sorted(reply(sock).WhichOneof("reply") for sock in waiting)
        assert answers == ["refused"] * 19 + ["welcome"]
        assert node.counters.attaches.value("refused_busy") == 19
        for sock in waiting:
            sock.close()


def reply(sock):
    """The next one."""
    sock.settimeout(HANG_S)
    size = int.from_bytes(exactly(sock, 4), "little")
    answer = channel_pb2.HelloReply()
    codec.parse(answer, exactly(sock, size))
    return answer


def exactly(sock, count):
    data = b""
    while len(data) < count:
        data += sock.recv(count - len(data))
    return data
