"""Store clients whose node is away, silent, killed or replaced; clients that die in the middle of a call; and clients
that send what no client should."""

import os
import random
import signal
import socket
import subprocess
import sys
import threading

import numpy as np
import pytest
from cachekernels.region import Side, WriterConflict

import cachesvc
from cachesvc.client.base import AttachRefused
from cachesvc.client.greeting import greet, new_hello
from cachesvc.node.node import Node
from cachesvc.node.ops import OpState
from cachesvc.node.parts import NodeOptions
from cachesvc.node.slab_ops import DeleteOp
from cachesvc.node.store_requests import Held
from cachesvc.node.store_sessions import StoreSession
from cachesvc.node.tiers import Tier
from cachesvc.outcomes import AttachResult, Reject
from cachesvc.rpc import channel_pb2, codec, managed_pb2, store_codec
from cachesvc.rpc.framing import FrameReader, to_frame
from storage_backends.base import Outcome
from storage_backends.errors import StorageUnavailable
from tests.helpers.channels import RunningDoor, connected
from tests.helpers.node_process import ROOT, NodeProcess
from tests.helpers.store_user import NAMESPACE, PAGE_BYTES, TENANT, check_conserved, positions, request, some_keys
from tests.oracles.pages import HANG_S, ScriptedBackend, memory_backend, page

OK, EXISTS, MISS, TIMEOUT, UNAVAILABLE = (
    int(o) for o in (Outcome.OK, Outcome.EXISTS, Outcome.MISS, Outcome.TIMEOUT, Outcome.UNAVAILABLE)
)
FRAMES = 8
KEYS = some_keys(4)
PAGES = np.stack([page(key, PAGE_BYTES) for key in KEYS])


def opened(path, **changes):
    wanted = {"tenant": TENANT, "namespace": NAMESPACE, "page_bytes": PAGE_BYTES, "memory_bytes": FRAMES * PAGE_BYTES}
    return cachesvc.connect_store(f"unix://{path}", **{**wanted, **changes})


def got(store, **options):
    out = np.zeros_like(PAGES)
    results = store.get(KEYS, out, **options)
    assert (out[results == Outcome.OK] == PAGES[results == Outcome.OK]).all(), "wrong bytes"
    return results.tolist()


@pytest.fixture
def backend():
    return ScriptedBackend(memory_backend())


@pytest.fixture
def node(backend):
    with Node([Tier("memory", backend)], options=NodeOptions(managed_bytes=64 * PAGE_BYTES)) as node:
        yield node
        check_conserved(node)


# the node is away


def again(store):
    """Lets the store try at once, instead of when its pause is over."""
    store._connection._retry_at_s = 0.0


def test_a_node_that_is_not_there_is_an_outcome(tmp_path):
    with opened(tmp_path / "none.sock") as store:
        assert not store.is_connected
        assert store.put(KEYS, PAGES).tolist() == [UNAVAILABLE] * 4
        assert got(store) == store.contains(KEYS).tolist() == store.delete(KEYS).tolist() == [UNAVAILABLE] * 4


def test_a_node_that_comes_later_is_found(tmp_path):
    with NodeProcess() as process:
        process.stop()
        with opened(process.path) as store:
            assert store.put(KEYS, PAGES).tolist() == [UNAVAILABLE] * 4
            process.start()
            again(store)
            assert store.put(KEYS, PAGES).tolist() == [OK] * 4
            assert got(store) == [OK] * 4


def test_a_killed_node_is_an_outcome_and_its_successor_is_found(tmp_path):
    with NodeProcess(tmp_path / "files") as process, opened(process.path) as store:
        assert store.put(KEYS, PAGES).tolist() == [OK] * 4
        process.kill()
        assert got(store) == [UNAVAILABLE] * 4
        assert store.put(KEYS, PAGES).tolist() == [UNAVAILABLE] * 4
        process.start()
        again(store)
        assert set(got(store)) <= {OK, MISS}
        assert set(store.put(KEYS, PAGES).tolist()) <= {OK, EXISTS}
        assert got(store) == [OK] * 4


def test_a_node_that_stops_in_good_order_leaves_its_pages_in_storage(tmp_path):
    with NodeProcess(tmp_path / "files") as process, opened(process.path) as store:
        assert store.put(KEYS, PAGES).tolist() == [OK] * 4
        process.stop()
        assert got(store) == [UNAVAILABLE] * 4
        process.start()
        again(store)
        assert got(store) == [OK] * 4


def test_a_frozen_node_costs_one_timeout_and_serves_again_when_it_thaws():
    with NodeProcess() as process, opened(process.path) as store:
        assert store.put(KEYS, PAGES).tolist() == [OK] * 4
        process.freeze()
        assert got(store, timeout_s=0.05) == [TIMEOUT] * 4
        assert not store.is_connected
        assert got(store) == [UNAVAILABLE] * 4  # at once, until the pause is over
        process.thaw()
        again(store)
        assert got(store) == [OK] * 4


def test_attempts_have_pauses_that_grow(tmp_path):
    store = opened(tmp_path / "none.sock")
    pauses = []
    for _ in range(8):
        again(store)
        got(store)
        pauses.append(store._connection._retry_s)
    assert pauses == [0.4, 0.8, 1.6, 3.2, 5.0, 5.0, 5.0, 5.0]


def test_a_read_that_takes_too_long_is_given_up_and_holds_nothing(node, door, backend):
    with opened(door.path) as store:
        store.put(KEYS, PAGES)
        for seed in range(1, 5):
            store.put(some_keys(4, seed), PAGES)
            door.until(lambda: not node.managed.slabs()[0].ops)  # stored, so that they may leave
        let_go = threading.Event()
        backend.before["get"] = lambda ids: let_go.wait(HANG_S) and None
        assert set(got(store, timeout_s=0.05)) == {TIMEOUT}
        let_go.set()
        backend.before.clear()
        again(store)
        assert got(store) == [OK] * 4
    door.until(lambda: not node.managed.num_sessions())
    assert node.managed.slabs()[0].counts()["held"] == 0


def test_clear_keeps_nothing_that_is_on_its_way_into_memory(node, door, backend, monkeypatch):
    with opened(door.path) as store, opened(door.path) as other:
        store.put(KEYS, PAGES)
        for seed in range(1, 5):
            store.put(some_keys(4, seed), PAGES)
            door.until(lambda: not node.managed.slabs()[0].ops)
        has_read, let_go, found = threading.Event(), threading.Event(), []
        get_into = backend.inner.get_into

        def read_and_wait(ids, segments):
            results = get_into(ids, segments)
            has_read.set()
            assert let_go.wait(HANG_S)
            return results

        monkeypatch.setattr(backend.inner, "get_into", read_and_wait)
        reader = threading.Thread(target=lambda: found.append(got(store)))
        reader.start()
        assert has_read.wait(HANG_S)
        assert other.clear() is Outcome.OK
        let_go.set()
        reader.join(HANG_S)
        assert found == [[MISS] * 4]
        assert got(store) == [MISS] * 4


class AskedBefore(ScriptedBackend):
    """Asks the guard, and writes when it is told to, whatever became of the source meanwhile."""

    def __init__(self, inner):
        super().__init__(inner)
        self.has_asked, self.let_go = threading.Event(), threading.Event()

    def put_from(self, ids, segments, guard=None):
        kept = guard()
        self.has_asked.set()
        assert self.let_go.wait(HANG_S)
        return self.inner.put_from(ids, segments, lambda: kept)


def test_clear_waits_for_what_is_being_written_and_takes_that_too():
    backend = AskedBefore(memory_backend())
    options = NodeOptions(managed_bytes=64 * PAGE_BYTES)
    with (
        Node([Tier("memory", backend)], options=options) as node,
        RunningDoor(node) as door,
        opened(door.path) as store,
        opened(door.path) as other,
    ):
        store.put(KEYS, PAGES)
        assert backend.has_asked.wait(HANG_S)
        cleared = []
        clearing = threading.Thread(target=lambda: cleared.append(other.clear()))
        clearing.start()

        def is_waiting():
            ops = node.managed.slabs()[0].ops.values()
            return any(isinstance(op, DeleteOp) and op.state is OpState.PARKED for op in list(ops))

        door.until(lambda: is_waiting() or not clearing.is_alive())
        backend.let_go.set()
        clearing.join(HANG_S)
        assert cleared == [Outcome.OK]
        door.until(lambda: not node.managed.slabs()[0].ops)
        assert got(store) == [MISS] * 4
        assert not [batch for batch in backend.scan() if len(batch.ids)]


def test_clear_says_which_tier_could_not_be_looked_through(door, backend, monkeypatch):
    def scan():
        raise StorageUnavailable("down")

    monkeypatch.setattr(backend, "scan", scan)
    with opened(door.path) as store:
        store.put(KEYS, PAGES)
        assert store.clear() is Outcome.UNAVAILABLE
        assert store.is_connected
        monkeypatch.undo()
        assert store.clear() is Outcome.OK
        assert got(store) == [MISS] * 4


def test_a_store_opened_before_a_fork_is_not_used_in_the_child(door):
    with opened(door.path) as store:
        store.put(KEYS, PAGES)
        pid = os.fork()
        if not pid:
            try:
                store.contains(KEYS)
            except RuntimeError as error:
                os._exit(0 if "fork" in str(error) else 1)
            os._exit(2)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        assert got(store) == [OK] * 4


def test_a_client_holds_its_slab_as_long_as_it_may_write_there(node, door):
    """The node proves by this lock that one which it cannot see writes no more."""
    with opened(door.path) as store:
        assert store.contains(KEYS).tolist() == [MISS] * 4
        (slab,) = node.managed.slabs()
        assert slab.region.is_held(Side.ENGINE)
    assert not slab.region.is_held(Side.ENGINE)


def test_a_refusal_says_need_and_have(door):
    with pytest.raises(AttachRefused, match=r"need 4194304 bytes, have 262144 of the 262144") as refused:
        opened(door.path, memory_bytes=4 << 20)
    assert refused.value.result is AttachResult.REFUSED_MEMORY


def test_a_node_without_managed_memory_refuses():
    with Node() as node, RunningDoor(node) as door, pytest.raises(AttachRefused, match="have 0 of the 0"):
        opened(door.path)


# between the node's answer and the copy


def test_a_page_deleted_while_it_is_copied_is_a_miss(door, monkeypatch):
    with opened(door.path) as store, opened(door.path) as other:
        store.put(KEYS, PAGES)
        region = store._connection._link.region
        read = region.read

        def late(frames, generations, addresses, **segments):
            other.delete(KEYS[1:3])
            return read(frames, generations, addresses, **segments)

        monkeypatch.setattr(region, "read", late)
        assert got(store) == [OK, MISS, MISS, OK]


def test_a_frame_that_somebody_else_writes_is_an_outcome(node, door, monkeypatch):
    def conflict(frames, *_, **__):
        raise WriterConflict("another writer was faster", frames.tolist())

    with opened(door.path) as store:
        monkeypatch.setattr(store._connection._link.region, "write", conflict)
        assert store.put(KEYS, PAGES).tolist() == [Outcome.CHANGED] * 4
        assert store.is_connected
        assert node.managed.slabs()[0].counts()["free"] == FRAMES


def test_an_interrupted_call_holds_nothing(node, door, monkeypatch):
    def interrupt(*_, **__):
        raise KeyboardInterrupt

    with opened(door.path) as store:
        monkeypatch.setattr(store._connection._link.region, "write", interrupt)
        with pytest.raises(KeyboardInterrupt):
            store.put(KEYS, PAGES)
        again(store)
        assert store.put(KEYS, PAGES).tolist() == [OK] * 4
        assert node.managed.slabs()[0].counts()["quarantined"] == 0


# clients that die


def child(path, step, seed=7):
    arguments = [str(path), str(PAGE_BYTES), str(seed), step]
    return subprocess.Popen([sys.executable, "-m", "tests.helpers.store_child", *arguments], cwd=ROOT)


@pytest.mark.parametrize("step", ["reserved", "begun", "written"])
def test_a_client_killed_in_mid_put_leaves_nothing(node, door, step):
    with opened(door.path) as store:
        store.put(KEYS, PAGES)
        assert child(door.path, step).wait() == -signal.SIGKILL
        slab = node.managed.slabs()[0]
        door.until(lambda: node.managed.num_sessions() == 1)
        node.tick()
        counts = slab.counts()
        assert counts["quarantined"] == counts["writing"] == 0
        assert store.contains(some_keys(3, 7)).tolist() == [MISS] * 3
        assert got(store) == [OK] * 4
        assert store.put(some_keys(4, 8), PAGES).tolist() == [OK] * 4


def test_a_client_killed_with_a_reference_releases_it(node, door):
    with opened(door.path) as store:
        keys = some_keys(3, 7)
        store.put(keys, PAGES[:3])
        assert child(door.path, "found").wait() == -signal.SIGKILL
        door.until(lambda: node.managed.num_sessions() == 1)
        door.until(lambda: node.managed.slabs()[0].counts()["held"] == 0)  # those that wait for storage have their own


def test_what_a_stopped_client_may_still_write_is_not_used_until_it_is_dead(node, door):
    process = child(door.path, "stopped")
    os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
    slab = node.managed.slabs()[0]
    session = next(iter(node.managed._sessions.values()))
    door.loop.call_soon_threadsafe(lambda: [c.abort() for c in list(door.door._desk.connections.values())])
    door.until(lambda: not node.managed.num_sessions())
    assert session.is_ended
    node.tick()
    assert slab.counts()["quarantined"] == 3
    process.kill()
    process.wait()
    node.tick()
    assert slab.counts()["quarantined"] == 0


# clients that send what no client should


class RawStore:
    """A store session that speaks word by word."""

    def __init__(self, path, before=None, **changes):
        """`before`: the Welcome of the session that this client had."""
        self.sock = connected(path)
        hello = new_hello()
        previous, boot_id = (before.session_id, before.boot_id) if before else (None, b"")
        hello.open_store.CopyFrom(store_codec.open_message(request(previous=previous, **changes), boot_id))
        greeted = greet(self.sock, hello, (), HANG_S)
        greeted.close_fds()
        self.welcome = greeted.welcome
        self.sock.settimeout(HANG_S)
        self._frames = FrameReader(1 << 30)

    def send(self, message):
        self.sock.sendall(message if isinstance(message, bytes) else to_frame(message))

    def receive(self):
        while (data := self._frames.next()) is None:
            received = self.sock.recv(1 << 16)
            if not received:
                return None
            self._frames.feed(received)
        message = managed_pb2.FromStore()
        codec.parse(message, data)
        return message

    def ask(self, message):
        self.send(message)
        return self.receive()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.sock.close()


ToStore = managed_pb2.ToStore
PAGES_ASKED = {"keys": KEYS.tobytes(), "depths": positions(4).tobytes()}


def reserve(call, **changes):
    return ToStore(call=call, reserve=managed_pb2.Reserve(**{**PAGES_ASKED, **changes}))


def get(call, **changes):
    return ToStore(call=call, get=managed_pb2.Get(**{**PAGES_ASKED, **changes}))


def commit(call, reserved, written=b"\1\1\1\1"):
    return ToStore(call=call, commit=managed_pb2.Commit(reserved=reserved, written=written))


MALFORMED = {
    "bytes": (b"\x04\x00\x00\x00\xff\xff\xff\xff", Reject.UNDECODABLE),
    "an empty message": (bytes(4), Reject.UNKNOWN),
    "a message of an engine": (channel_pb2.ToNode(call=1, ping=channel_pb2.Ping()), Reject.UNKNOWN),
    "half a key": (reserve(1, keys=bytes(33)), Reject.BAD_LENGTH),
    "half a depth": (get(1, depths=bytes(15)), Reject.BAD_LENGTH),
    "depths too few": (reserve(1, depths=bytes(12)), Reject.BAD_LENGTH),
    "no keys": (get(1, keys=b"", depths=b""), Reject.BAD_LENGTH),
    "more pages than may be held": (get(1, keys=bytes(160), depths=bytes(20)), Reject.BAD_LENGTH),
    "more keys than a call may have": (
        ToStore(call=1, contains=managed_pb2.Contains(keys=bytes(32 * 4097))),
        Reject.BAD_LENGTH,
    ),
    "a hold of more keys than a call may have": (
        ToStore(call=1, hold=managed_pb2.Hold(keys=bytes(32 * 4097))),
        Reject.BAD_LENGTH,
    ),
    "no call": (reserve(0), Reject.BAD_OP),
    "frames of nobody": (commit(1, 99), Reject.BAD_OP),
}


def rejected(node, reason):
    return node.registry.snapshot()[f'cachesvc_channel_rejected_total{{reason="{reason}"}}']


@pytest.mark.parametrize("kind", MALFORMED)
def test_what_cannot_be_meant_is_refused_and_counted(node, door, kind):
    message, reason = MALFORMED[kind]
    with RawStore(door.path) as client:
        answer = client.ask(message)
        assert answer.error.reason == reason
        assert rejected(node, reason) == 1
        assert client.ask(reserve(2)).reserved.outcomes == bytes(4), "the session goes on"
    door.until(lambda: not node.managed.num_sessions())


def test_a_message_sent_twice_does_nothing_the_second_time(node, door):
    with RawStore(door.path) as client:
        assert client.ask(reserve(1)).reserved.outcomes == bytes(4)
        for replayed in (reserve(1), get(1)):
            assert client.ask(replayed).error.reason == Reject.BAD_OP
        assert node.managed.slabs()[0].counts()["writing"] == 4
        assert client.ask(commit(2, 1, bytes(4))).committed.outcomes == bytes([Outcome.CHANGED] * 4)
        assert client.ask(commit(3, 1, bytes(4))).error.reason == Reject.BAD_OP


def test_a_door_that_closes_does_not_wait_for_reads_that_hang_nor_free_what_is_being_written(node, backend):
    let_go = threading.Event()
    with RunningDoor(node) as door, RawStore(door.path) as client, RawStore(door.path) as writer:
        for seed in range(2, 12, 2):  # so many that the first are only in storage
            with opened(door.path) as store:
                assert store.put(some_keys(4, seed), PAGES).tolist() == [OK] * 4
            door.until(lambda: not node.managed.slabs()[0].ops)
        writer.ask(reserve(1))
        backend.before["get"] = lambda ids: let_go.wait(HANG_S) and None
        asked = {"keys": some_keys(4, 2).tobytes(), "depths": positions(4).tobytes()}
        client.send(get(1, **asked))
        door.until(lambda: node.managed.slabs()[0].ops)
        assert door.stop(0.05) == 0
        assert client.receive() is None
        assert node.managed.slabs()[0].counts()["quarantined"] == 4
        let_go.set()


def test_another_sessions_frames_and_reads_are_out_of_reach(node, door):
    with RawStore(door.path) as client, RawStore(door.path) as other, RawStore(door.path, tenant="x") as stranger:
        client.ask(reserve(1))
        for thief in (other, stranger):
            assert thief.ask(commit(7, 1)).error.reason == Reject.BAD_OP
            thief.send(ToStore(call=8, release=managed_pb2.Release(found=1)))
            assert thief.ask(commit(9, 1)).error.reason == Reject.BAD_OP
        assert node.managed.slabs()[0].counts()["writing"] == 4
        assert client.welcome.store.num_frames == FRAMES


def test_an_oversized_message_ends_its_session_and_no_other(node, door):
    with RawStore(door.path) as client, opened(door.path) as store:
        client.send(b"\xff\xff\xff\x7f")
        assert client.receive().error.reason == Reject.OVERSIZED
        assert client.receive() is None
        assert store.put(KEYS, PAGES).tolist() == [OK] * 4


@pytest.mark.parametrize(
    ("changes", "reason"),
    [({"page_bytes": 1 << 51}, "page_bytes"), ({"memory_bytes": 1 << 60}, "memory_bytes"), ({"tenant": ""}, "tenant")],
)
def test_a_hello_that_cannot_be_meant_is_refused(door, changes, reason):
    hello = new_hello()
    hello.open_store.CopyFrom(store_codec.open_message(request()))
    for name, value in changes.items():
        setattr(hello.open_store, name, value)
    with pytest.raises(AttachRefused, match=reason):
        greet(connected(door.path), hello, (), HANG_S)


def contains(call, keys=KEYS):
    return ToStore(call=call, contains=managed_pb2.Contains(keys=keys.tobytes()))


def test_what_memory_answers_keeps_its_place_among_the_others(node, door, monkeypatch):
    """Of pages that are all in memory the session is not asked."""

    def unasked(*_):
        raise AssertionError("the session was asked")

    with RawStore(door.path) as client, opened(door.path) as store:
        store.put(KEYS, PAGES)
        monkeypatch.setattr(StoreSession, "contains", unasked)
        before = node.counters.managed_pages.value("contains", "ok")
        messages = [contains(call) if call % 3 else reserve(call) for call in range(1, 100)]
        client.send(b"".join(map(to_frame, messages)))
        for call in range(1, 100):
            answer = client.receive()
            assert answer.call == call
            assert answer.WhichOneof("body") == ("held" if call % 3 else "reserved")
            if call % 3:
                assert answer.held.outcomes == bytes(4)
        door.until(lambda: node.counters.managed_pages.value("contains", "ok") == before + 66 * 4)
        for replayed in (contains(98), reserve(99), contains(1)):
            monkeypatch.undo()
            assert client.ask(replayed).error.reason == Reject.BAD_OP
        delete = ToStore(call=100, delete=managed_pb2.Delete(keys=KEYS[:1].tobytes()))
        assert client.ask(delete).deleted.outcomes == bytes([OK])
        assert client.ask(contains(101)).held.outcomes == bytes([MISS, OK, OK, OK])


def test_of_a_node_without_tiers_memory_answers_what_is_missing_too(monkeypatch):
    def unasked(*_):
        raise AssertionError("the session was asked")

    monkeypatch.setattr(StoreSession, "contains", unasked)
    options = NodeOptions(managed_bytes=64 * PAGE_BYTES)
    with Node([], options=options) as node, RunningDoor(node) as door, RawStore(door.path) as client:
        with opened(door.path) as store:
            store.put(KEYS[:3], PAGES[:3])
        for call in range(1, 11):
            assert client.ask(contains(call)).held.outcomes == bytes([OK, OK, OK, MISS])
        pages = node.counters.managed_pages
        door.until(lambda: [pages.value("contains", outcome) for outcome in ("ok", "miss")] == [30, 10])


def test_an_answer_that_nobody_waits_for_does_not_hide_the_one_to_contains(door):
    with opened(door.path) as store:
        store.put(KEYS, PAGES)
        link = store._connection._link
        for _ in range(3):
            begun = reserve(0)
            link.begin(begun)
            link.forget(begun)
            assert store.contains(KEYS).tolist() == [OK] * 4
        assert not link._answers


def test_contains_of_a_node_that_is_frozen_or_killed_is_an_outcome():
    with NodeProcess() as process, opened(process.path) as store:
        assert store.put(KEYS, PAGES).tolist() == [OK] * 4
        assert store.contains(KEYS).tolist() == [OK] * 4
        process.freeze()
        assert store.contains(KEYS, timeout_s=0.05).tolist() == [TIMEOUT] * 4
        assert not store.is_connected
        process.thaw()
        again(store)
        assert store.contains(KEYS).tolist() == [OK] * 4
        process.kill()
        assert store.contains(KEYS).tolist() == [UNAVAILABLE] * 4


def test_random_messages_leave_the_node_in_order(node, door):
    random_ = random.Random(5)
    delete = managed_pb2.Delete(keys=KEYS.tobytes())
    bodies = [reserve(1), get(1), commit(2, 1), ToStore(call=3, delete=delete), contains(4), contains(2)]
    before = None
    for _ in range(60):
        with RawStore(door.path, before) as client:
            for _ in range(random_.randrange(1, 6)):
                body = bytearray(random_.choice(bodies).SerializeToString())
                for _ in range(random_.randrange(4)):
                    body[random_.randrange(len(body))] = random_.randrange(256)
                client.send(len(body).to_bytes(4, "little") + bytes(body))
            before = client.welcome
        door.until(lambda: not node.managed.num_sessions())
    assert node.managed.slabs()[0].counts()["writing"] == 0
    RawStore(door.path, before).sock.close()
    with opened(door.path) as store:
        assert store.put(KEYS, PAGES).tolist() == [OK] * 4
    assert node.registry.snapshot()["cachesvc_channel_exceptions_total"] == 0


@pytest.mark.parametrize("boot_id", [b"", bytes(16)])
def test_the_word_of_a_client_of_another_node_is_not_taken(node, door, boot_id):
    with RawStore(door.path) as client:
        client.ask(reserve(1))
        before = client.welcome
    door.until(lambda: not node.managed.num_sessions())
    assert node.managed.slabs()[0].counts()["quarantined"] == 4
    right, before.boot_id = before.boot_id, boot_id
    with RawStore(door.path, before):
        assert node.managed.slabs()[0].counts()["quarantined"] == 4
        before.boot_id = right
        with RawStore(door.path, before):
            assert node.managed.slabs()[0].counts()["quarantined"] == 0


def test_a_door_that_is_no_node_is_an_outcome(tmp_path):
    path = tmp_path / "s"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()
        store = opened(path, connect_timeout_s=0.05)
        assert got(store) == [UNAVAILABLE] * 4


def test_an_outcome_that_a_newer_node_says_is_no_page(door, monkeypatch):
    said = np.array([Outcome.OK, Outcome.MISS, max(Outcome) + 1, 255], np.uint8)
    monkeypatch.setattr(StoreSession, "contains", lambda session, call, _: session._tell(Held(call, said)))
    with opened(door.path) as store:
        assert store.contains(KEYS).tolist() == [OK, MISS, Outcome.FAILED, Outcome.FAILED]
