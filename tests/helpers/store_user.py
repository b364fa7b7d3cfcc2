"""A client of node-managed memory in the node's process, step by step, for tests of the node."""

import socket

import numpy as np
from cachekernels.region import Region, Side
from cachekernels.wires import Exchange, Wire

from cachesvc.identity import store_keys
from cachesvc.node.ops import NO_KEYS
from cachesvc.node.sessions import NO_PEER
from cachesvc.node.store_requests import Committed, Deleted, Found, Held, Reserved
from cachesvc.node.store_sessions import StoreRequest
from cachesvc.rpc import managed_pb2
from cachesvc.rpc.framing import FrameReader, to_frame
from storage_backends.base import Outcome
from tests.oracles.pages import page

PAGE_BYTES = 4096
TENANT, NAMESPACE = "team-a", "app/model"


def some_keys(count, seed=0):
    """uint8 [count, 32] as a client may give them."""
    return np.random.default_rng(seed).integers(0, 256, (count, 32), dtype=np.uint8)


def positions(count):
    return np.arange(count, dtype=np.uint32)


def row_addresses(pages):
    return np.uint64(pages.ctypes.data) + np.arange(len(pages), dtype=np.uint64) * np.uint64(pages.shape[1])


def request(tenant=TENANT, namespace=NAMESPACE, page_bytes=PAGE_BYTES, frames=8, previous=None):
    return StoreRequest(tenant, namespace, page_bytes, frames * (-(-page_bytes // 4096) * 4096), previous)


class StoreUser:
    """One store session, with its answers by call. It shows that it lives by the lock on the slab's memory, or by
    `peer`, a pidfd."""

    def __init__(self, node, peer=NO_PEER, **kwargs):
        self.node = node
        self.request = request(**kwargs)
        self.session = node.managed.open(self.request, peer=peer)
        slab_region = self.session.slab.region
        self.region = Region.open(slab_region.data_fd, slab_region.directory_fd)
        self.region.hold(Side.ENGINE)
        self.answers = {}
        self.call = 0

    def own_keys(self, keys):
        """The node's keys for them."""
        return store_keys(self.request.tenant, self.request.namespace, self.request.page_bytes, keys)

    def ask(self, verb, *arguments):
        """Sends a call; returns its number."""
        self.call += 1
        getattr(self.session, verb)(self.call, *arguments)
        return self.call

    def answer(self, call):
        """The answer of a call; None: not yet."""
        for answer in self.session.events.poll():
            assert answer.call not in self.answers, "answered twice"
            self.answers[answer.call] = answer
        return self.answers.get(call)

    def answered(self, call):
        """Runs the node, which has no threads, until the answer is there."""
        while (answer := self.answer(call)) is None:
            assert self.node.run_one(), f"call {call} is never answered"
        return answer

    def reserve(self, keys, prefix=NO_KEYS):
        call = self.ask("reserve", keys, positions(len(keys)) + np.uint32(len(prefix)), prefix)
        answer = self.answer(call)
        assert isinstance(answer, Reserved)
        return answer

    def write(self, keys, frames, pages=None):
        """The client's W1 to W4."""
        own = self.own_keys(keys)
        if pages is None:
            pages = np.stack([page(key, self.request.page_bytes) for key in keys])
        assert self.region.write(frames, row_addresses(pages), own, positions(len(frames))).all()

    def commit(self, reserved, written=None):
        written = np.ones(len(reserved.frames), np.bool_) if written is None else np.array(written, np.bool_)
        answer = self.answer(self.ask("commit", reserved.call, written))
        assert isinstance(answer, Committed)
        return answer.outcomes

    def put(self, keys, prefix=NO_KEYS):
        """Outcomes by page."""
        reserved = self.reserve(keys, prefix)
        results = reserved.outcomes.copy()
        if len(reserved.frames):
            self.write(keys[results == Outcome.OK], reserved.frames)
            results[results == Outcome.OK] = self.commit(reserved)
        return results.tolist()

    def find(self, keys, prefix=NO_KEYS):
        answer = self.answered(self.ask("get", keys, positions(len(keys)) + np.uint32(len(prefix)), prefix))
        assert isinstance(answer, Found)
        assert len(answer.frames) == np.count_nonzero(answer.outcomes == Outcome.OK)
        return answer

    def hold(self, keys):
        answer = self.answer(self.ask("hold", keys))
        assert isinstance(answer, Found)
        return answer

    def read(self, found):
        """The bytes of the pages that were found, [n, page_bytes], and whether each was stable."""
        out = np.zeros((len(found.frames), self.request.page_bytes), np.uint8)
        return out, self.region.read(found.frames, found.generations, row_addresses(out))

    def get(self, keys, prefix=NO_KEYS):
        """Outcomes by page; the bytes are checked."""
        found = self.find(keys, prefix)
        if len(found.frames):
            pages, is_stable = self.read(found)
            assert is_stable.all()
            for key, content in zip(keys[found.outcomes == Outcome.OK], pages, strict=True):
                assert (content == page(key, self.request.page_bytes)).all(), "wrong bytes"
            self.session.release(found.call)
        return found.outcomes.tolist()

    def contains(self, keys):
        answer = self.answered(self.ask("contains", keys))
        assert isinstance(answer, Held)
        return answer.outcomes.tolist()

    def contains_natively(self, keys):
        """Outcomes by page, where the channel answers in front of the session; None: it would ask the session."""
        self.call += 1
        ours, theirs = socket.socketpair()
        exchange = Exchange(max_keys=1 << 20)
        with ours, theirs:
            number = exchange.add(Wire(ours.fileno(), 4 << 20, 1 << 20), self.session.shortcut)
            asked = managed_pb2.ToStore(call=self.call, contains=managed_pb2.Contains(keys=keys.tobytes()))
            theirs.sendall(to_frame(asked))
            exchange.serve()
            is_asked = exchange.next(number) is not None
            told = exchange.take_num_pages()
            exchange.close()
            if is_asked:
                assert not any(told)
                return None
            reader = FrameReader(1 << 20)
            reader.feed(theirs.recv(1 << 20))
            answer = managed_pb2.FromStore.FromString(reader.next())
        assert answer.call == self.session.shortcut.last == self.call
        results = list(answer.held.outcomes)
        assert len(results) == len(keys)
        assert told == (0, results.count(Outcome.OK), results.count(Outcome.MISS))
        return results

    def delete(self, keys):
        answer = self.answered(self.ask("delete", keys))
        assert isinstance(answer, Deleted)
        return answer.outcomes.tolist()


def check_conserved(node):
    """Every frame of every slab is one thing, and the account agrees with what is lent and asked for."""
    for slab in node.managed.slabs():
        slab.check()
        counts = slab.counts()
        states = ("free", "writing", "lent", "cached", "doomed", "quarantined")
        assert sum(counts[state] for state in states) == slab.region.num_frames
        assert counts["lent"] == sum(op.num_lent() for op in slab.ops.values())
        sessions = [s for s in node.managed._sessions.values() if s.slab is slab]
        granted = sum(len(grant.frames) for s in sessions for grant in s._grants.values())
        assert counts["writing"] == granted
        assert counts["quarantined"] == sum(len(suspect.frames) for suspect in slab.suspects)
