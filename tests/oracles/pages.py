"""What every page must hold, and an engine's side of a node, for tests of the node.

The bytes of a page are SHAKE-256 of its key: a page in the wrong place, or half a page, is never equal to what it
should be.
"""

import hashlib
import select
from collections import Counter
from dataclasses import replace

import numpy as np
from cachekernels.pages import chain_keys

from cachesvc.client.base import AttachRequest
from cachesvc.client.inprocess import InProcessClient
from cachesvc.identity import NO_SCOPE, Identity
from cachesvc.node.events import LookupDone, OpEnded, PagesRead, PagesStored
from storage_backends.base import Outcome, StorageBackend
from storage_backends.registry import open_backend

IDENTITY = Identity(
    model_id="m",
    weights_digest="r1",
    config_digest="c",
    dtype="bfloat16",
    page_size=16,
    num_layers=4,
    num_kv_heads=2,
    head_dim=8,
)
PAGE_BYTES = IDENTITY.page_bytes()
HANG_S = 60.0
"""How long a test waits for an event that must come; reached only by a bug."""


def memory_backend():
    """A backend that rests in this process."""
    return open_backend("memory", {})


def chain(seed, num_pages, identity=IDENTITY, scope=NO_SCOPE):
    """The keys of a prompt of `num_pages` whole pages; prompts of one seed are prefixes of each other."""
    tokens = np.random.default_rng(seed).integers(0, 50_000, num_pages * identity.page_size).astype(np.uint32)
    return chain_keys(identity.namespace(), scope, tokens, identity.page_size)


def page(key, num_bytes=PAGE_BYTES):
    """The bytes of the page with this key."""
    return np.frombuffer(hashlib.shake_256(key.tobytes()).digest(num_bytes), np.uint8)


def indices(*values):
    """int32 frames."""
    return np.array(values, np.int32)


class Engine:
    """An attached client that checks what it is given: every page exactly one outcome, every good page the right
    bytes."""

    def __init__(self, node, group="engine", num_frames=64, identity=IDENTITY, client=None):
        self.node = node
        self.client = InProcessClient(node) if client is None else client
        self.attachment = self.client.attach(AttachRequest(identity, group, num_frames, identity.page_bytes()))
        self.region = self.attachment.region
        self.page_bytes = identity.page_bytes()
        self.outcomes = {}
        self.ends = {}
        self.hits = {}

    def fill(self, keys, frames, *, publish=True):
        """Writes the pages of `keys` into frames, as an engine that computed them does."""
        self.region.begin_write(frames)
        data = self.region.data()
        for key, frame in zip(keys, frames, strict=True):
            data[frame, : self.page_bytes] = page(key, self.page_bytes)
        self.region.write_records(frames, keys, depths(keys))
        self.region.commit(frames)
        if publish:
            self.client.publish(frames)

    def prefetch(self, keys, frames, first_depth=0):
        op = self.client.prefetch(keys, frames, depths(keys, first_depth))
        assert isinstance(op, int), op
        self.outcomes[op] = np.full(len(keys), 255, np.uint8)
        return op

    def backup(self, keys, frames, first_depth=0):
        op = self.client.backup(keys, frames, depths(keys, first_depth))
        assert isinstance(op, int), op
        self.outcomes[op] = np.full(len(keys), 255, np.uint8)
        return op

    def poll(self):
        """Takes in all events and returns them."""
        events = self.client.poll()
        for event in events:
            assert event.op not in self.ends, "an event after the end of its op"
            match event:
                case PagesRead(op, first, results) | PagesStored(op, first, results):
                    told = self.outcomes[op][first : first + len(results)]
                    assert (told == 255).all(), "a page was answered twice"
                    told[:] = results
                case LookupDone(op, num_pages):
                    self.hits[op] = num_pages
                case OpEnded(op, reason):
                    assert (self.outcomes.get(op, np.empty(0)) != 255).all(), "an op ended with unanswered pages"
                    self.ends[op] = reason
        return events

    def wait(self, op):
        """Until `op` has ended; for nodes with threads. Returns why it ended."""
        while op not in self.ends:
            assert select.select([self.client.fileno()], [], [], HANG_S)[0], f"op {op} never ended"
            self.poll()
        return self.ends[op]

    def check_pages(self, keys, frames):
        """The frames hold these pages, by bytes, by key and by generation."""
        assert self.region.snapshot(frames, keys).all()
        data = self.region.data()
        for key, frame in zip(keys, frames, strict=True):
            assert (data[frame, : self.page_bytes] == page(key, self.page_bytes)).all(), f"frame {frame} is wrong"


def depths(keys, first=0):
    """Positions first, first + 1, ... of a chain's pages."""
    return np.arange(first, first + len(keys), dtype=np.uint32)


def run_all(node):
    """Everything a node without threads can do now."""
    while node.run_one():
        pass


class ScriptedBackend(StorageBackend):
    """A layer that counts what it is asked for and lets a test step in before each call.

    `before[verb]` is called with the ids; what it raises is raised, what it returns (outcomes) is the answer, None
    goes on to the inner backend. Verbs: contains, get, put, delete.
    """

    def __init__(self, inner, **changes):
        self.inner = inner
        self.before = {}
        self.reads = Counter()
        self.writes = Counter()
        self.calls = Counter()
        self.is_closed = False
        self._changes = changes

    def capabilities(self):
        return replace(self.inner.capabilities(), **self._changes)

    def contains(self, ids):
        return self._call("contains", ids, lambda: self.inner.contains(ids))

    def get_into(self, ids, segments):
        self.reads.update(row.tobytes() for row in ids)
        return self._call("get", ids, lambda: self.inner.get_into(ids, segments))

    def put_from(self, ids, segments, guard=None):
        self.writes.update(row.tobytes() for row in ids)
        return self._call("put", ids, lambda: self.inner.put_from(ids, segments, guard))

    def touch(self, ids):
        self.inner.touch(ids)

    def delete(self, ids):
        return self._call("delete", ids, lambda: self.inner.delete(ids))

    def sizes(self, ids):
        return self.inner.sizes(ids)

    def set_aside(self, ids, seen):
        return self.inner.set_aside(ids, seen)

    def scan(self):
        return self.inner.scan()

    def usage(self):
        return self.inner.usage()

    def close(self):
        self.is_closed = True
        self.inner.close()

    def _call(self, verb, ids, inner):
        self.calls[verb] += 1
        hook = self.before.get(verb)
        answer = hook(ids) if hook else None
        return inner() if answer is None else answer


class ScanningBackend(ScriptedBackend):
    """Its scan ends right after memory has told that it knows nothing. `is_scanning = True` starts one."""

    is_scanning = False

    def knows_all(self):
        return not self.is_scanning

    def known(self, ids):
        if not self.is_scanning:
            return super().known(ids)
        self.is_scanning = False
        return np.zeros(len(ids), np.bool_)


OK, EXISTS, MISS, CANCELLED = (int(o) for o in (Outcome.OK, Outcome.EXISTS, Outcome.MISS, Outcome.CANCELLED))
