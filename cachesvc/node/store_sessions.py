"""Store sessions: one client of node-managed memory, and what it may do.

A verb takes the number of the call; its answer comes from `events.poll()`, at once where nothing has to be waited for.
What a call took (frames to write, pages to read) is the client's until it gives it back, or leaves, or is lost.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from cachekernels.pages import object_ids
from numpy.typing import NDArray

from cachesvc.client.base import SessionClosed
from cachesvc.identity import store_keys
from cachesvc.node.arguments import check_keys
from cachesvc.node.counters import count_outcomes
from cachesvc.node.events import EventQueue
from cachesvc.node.ops import NO_KEYS
from cachesvc.node.sessions import NO_PEER
from cachesvc.node.slab_ops import SaveOp
from cachesvc.node.slabs import Slab, Suspect
from cachesvc.node.store_requests import (
    Answer,
    Cleared,
    Clearing,
    Committed,
    Deleted,
    Deletion,
    Found,
    Grant,
    Held,
    Hold,
    Lookup,
    OneAnswer,
    Read,
    Reserved,
    distinct,
)
from cachesvc.outcomes import ManagedVerb, Reject, Unsaved
from storage_backends.base import Outcome, Outcomes, outcomes

I32 = NDArray[np.int32]
U32 = NDArray[np.uint32]
Bools = NDArray[np.bool_]
Keys = NDArray[np.uint8]

NO_FRAMES = np.empty(0, np.int32)


class BadRequest(ValueError):
    """A client asked for something that cannot be meant; nothing was done. `reason` says the kind."""

    def __init__(self, reason: Reject, message: str) -> None:
        super().__init__(message)
        self.reason = reason


@dataclass(frozen=True)
class StoreRequest:
    """Who wants node-managed memory. `memory_bytes` is the size of the tenant's slab where this request makes it.

    `previous`: the session this client had at this node, none of whose frames it writes any more.
    """

    tenant: str
    namespace: str
    page_bytes: int
    memory_bytes: int
    previous: int | None = None


class StoreSession:
    """One client of a slab. Calls come from one thread at a time; each number is above all before it.

    Raises BadRequest, and does nothing then. What cannot be done now is an outcome: THROTTLED (the client holds too
    much, or asks too often), NO_SPACE (no frame can be had), UNAVAILABLE (the node is going away).
    """

    def __init__(
        self, session_id: int, request: StoreRequest, slab: Slab, ids: Iterator[int], peer: int = NO_PEER
    ) -> None:
        options, num_frames = slab.parts.options, slab.region.num_frames
        self.session_id = session_id
        self.request = request
        self.slab = slab
        self.events: EventQueue[Answer] = EventQueue()
        self.is_ended = False
        self.max_keys = options.managed_max_keys
        self.max_held_pages = max(1, num_frames // 2)
        self.max_pages = min(self.max_held_pages, self.max_keys, max(1, options.slice_bytes // slab.region.frame_bytes))
        self.shortcut = slab.shortcut(request.namespace, self.max_keys)
        self._ids = ids
        self._peer = os.dup(peer) if peer >= 0 else peer
        self._grants: dict[int, Grant] = {}
        self._reads: dict[int, Read] = {}
        self._lookups: dict[int, Lookup] = {}
        self._deletions: dict[int, Deletion] = {}
        self._clearing: Clearing | None = None

    def reserve(self, call: int, keys: Keys, depths: U32, prefix: Keys = NO_KEYS) -> None:
        """Grants a frame for each page that is not there. Answer: Reserved; where it grants any, `commit` ends it.
        `prefix` [m, 32]: pages in front of them in their prompt, which are used with them."""
        prefix = self._check_prefix(prefix)
        keys = self._check_pages(call, keys, depths)
        with self.slab.parts.state:
            reason = self._why_not(len(keys))
            if reason is None:
                results, frames = self._grant(call, keys, depths, prefix)
            else:
                results, frames = self._none(len(keys), reason)
            self._count(ManagedVerb.PUT, results[results != Outcome.OK])
            self._tell(Reserved(call, results, frames))
        self._use_in_tiers(prefix, keys)

    def commit(self, call: int, reserved: int, written: Bools) -> None:
        """Gives the frames of a call that was answered Reserved back, written or not. Answer: Committed."""
        self._check_call(call)
        with self.slab.parts.state:
            grant = self._grants.get(reserved)
            if grant is None:
                raise BadRequest(Reject.BAD_OP, f"call {reserved} holds no frames of this session")
            if written.shape != grant.frames.shape:
                raise BadRequest(
                    Reject.BAD_LENGTH, f"{len(grant.frames)} frames were granted, {len(written)} are given back"
                )
            del self._grants[reserved]
            results = grant.commit(written)
            self._count(ManagedVerb.PUT, results)
            self._tell(Committed(call, results))

    def get(self, call: int, keys: Keys, depths: U32, prefix: Keys = NO_KEYS) -> None:
        """Finds pages, bringing those of lower tiers in. Answer: Found; where it found any, `release` ends it. `prefix`
        as of `reserve`."""
        prefix = self._check_prefix(prefix)
        keys = self._check_pages(call, keys, depths)
        with self.slab.parts.state:
            reason = self._why_not(len(keys))
            if reason is not None:
                self._found_nothing(call, ManagedVerb.GET, len(keys), reason)
                return
            read = self._reads[call] = Read(self, call, keys, depths, prefix)
            read.start()
        self._use_in_tiers(prefix, keys)

    def hold(self, call: int, keys: Keys) -> None:
        """Finds pages in memory alone, from the first key up to one that is not there. Answer: Found, at once; where it
        found any, `release` ends it. THROTTLED are pages that are there and more than this client may hold."""
        keys = self._check_keys(call, keys, self.max_keys)
        with self.slab.parts.state:
            reason = self._why_not(0)
            if reason is not None:
                self._found_nothing(call, ManagedVerb.HOLD, len(keys), reason)
                return
            hold = self._reads[call] = Hold(self, call, keys, max_pages=self.max_held_pages - self._num_held())
            hold.start()

    def used(self, call: int, prefix: Keys) -> None:
        """The first pages of a prompt are used by a client that has them itself. No answer; pages that are not here are
        passed over."""
        prefix = self._check_prefix(prefix)
        self._check_call(call)
        with self.slab.parts.state:
            if not self.slab.is_draining:
                self.slab.use(prefix)
        self._use_in_tiers(prefix, NO_KEYS)

    def release(self, found: int) -> None:
        """Gives back what a `get` or `hold` found, or gives it up before its answer. No answer. A call that holds
        nothing, any more or at all, is left alone."""
        with self.slab.parts.state:
            read = self._reads.pop(found, None)
            if read is not None:
                read.give_up()

    def contains(self, call: int, keys: Keys) -> None:
        """Which pages can be had. Takes nothing. Answer: Held; it may come from `shortcut` instead, where memory alone
        tells."""
        keys = self._check_keys(call, keys, self.max_keys)
        with self.slab.parts.state:
            reason = self._why_not(0)
            if reason is Outcome.THROTTLED and self._can_memory_tell(keys):
                reason = None  # its answer takes nothing, and `shortcut` gives it at any time
            if reason is not None:
                self.answered(call, ManagedVerb.CONTAINS, Held(call, outcomes(len(keys), reason)))
                return
            lookup = self._lookups[call] = Lookup(self, call, keys, np.zeros(len(keys), np.uint32))
            lookup.start()

    def delete(self, call: int, keys: Keys) -> None:
        """Takes pages out of memory and tiers. Answer: Deleted; a `get` begun after it finds none of them."""
        keys = self._check_keys(call, keys, self.max_keys)
        with self.slab.parts.state:
            reason = self._why_not(0)
            if reason is not None:
                self.answered(call, ManagedVerb.DELETE, Deleted(call, outcomes(len(keys), reason)))
                return
            deletion = self._deletions[call] = Deletion(self, call, keys)
            deletion.start()

    def clear(self, call: int) -> None:
        """Takes every page of the client's namespace and page size out of memory and tiers: those put before this.
        Answer: Cleared; THROTTLED while one is under way."""
        self._check_call(call)
        with self.slab.parts.state:
            reason = self._why_not(0) if self._clearing is None else Outcome.THROTTLED
            if reason is not None:
                self._tell(Cleared(call, reason, 0))
                return
            self._clearing = Clearing(self, call)
            self._clearing.start()

    @property
    def is_idle(self) -> bool:
        """Every `get` and `contains` has its answer."""
        return all(request.is_over for request in self._asked())

    def give_up(self) -> None:
        """Gives up what has no answer yet: nobody waits for it any more."""
        with self.slab.parts.state:
            for request in self._asked():
                if not request.is_over:
                    request.give_up()

    def wait_idle(self, timeout_s: float) -> None:
        """Blocks until every `get` and `contains` has its answer, or the time is over."""
        parts = self.slab.parts
        with parts.state:
            parts.pool.wait_for(parts.state, lambda: self.is_idle, parts.clock.now() + timeout_s)

    def end(self, *, has_left: bool) -> None:
        """Gives everything back. `has_left`: the client writes nothing any more; else frames that it may still write
        are not used before it is proven dead. The state lock is held."""
        self.is_ended = True
        self.shortcut.stop()
        for request in self._asked():
            request.give_up()
        for grant in self._grants.values():
            if has_left:
                grant.give_up()
        suspected = [grant.frames for grant in self._grants.values() if not has_left]
        self.slab.suspect(Suspect(self.session_id, np.concatenate([NO_FRAMES, *suspected]), self._peer))
        self._grants.clear()
        self._reads.clear()
        self._lookups.clear()
        self._deletions.clear()
        self.events.close()

    def next_op(self) -> int:
        """A number for an op of the slab."""
        return next(self._ids)

    def save(self, keys: Keys, frames: I32, depths: U32, prefix: Keys) -> None:
        """Queues pages that were put, behind those of `prefix`, for the tiers, as far as the slab's lane has room: at
        most half of the frames wait. The state lock is held."""
        slab = self.slab
        if not len(frames) or not slab.parts.tiers.can_write:
            return
        num_frames = slab.region.num_frames
        limit = max(1, min(slab.parts.options.waiting_store_limit(num_frames), num_frames // 2))
        accepted = min(len(frames), max(0, limit - slab.lane.waiting_pages))
        slab.parts.counters.unsaved_pages.inc(len(frames) - accepted, Unsaved.QUEUE_FULL)
        if accepted:
            op = SaveOp(self.next_op(), slab, keys[:accepted], frames[:accepted], depths[:accepted])
            op.prefix = prefix
            slab.ops[op.op_id] = op
            slab.lane.append(op)

    def answered(self, call: int, verb: ManagedVerb, answer: Found | Held | Deleted) -> None:
        """A request has its answer. Only a read goes on, until it is given back."""
        self._lookups.pop(call, None)
        self._deletions.pop(call, None)
        self._count(verb, answer.outcomes)
        self._tell(answer)

    def cleared(self, answer: Cleared) -> None:
        """A clearing is over."""
        self._clearing = None
        self.slab.parts.counters.managed_pages.inc(answer.num_pages, ManagedVerb.CLEAR, Outcome.OK.name.lower())
        self._tell(answer)

    def holds_nothing(self, call: int) -> None:
        """A read found no page: there is nothing to give back."""
        del self._reads[call]

    def _asked(self) -> list[Lookup]:
        return [*self._reads.values(), *self._lookups.values()]

    def _grant(self, call: int, keys: Keys, depths: U32, prefix: Keys) -> tuple[Outcomes, I32]:
        use = self.slab.use(prefix)
        found, _ = self.slab.find(keys)
        self.slab.table.touch(found[found >= 0], use)
        results = outcomes(len(keys), Outcome.EXISTS)
        missing = distinct(keys, np.flatnonzero(found < 0))
        frames = self.slab.take(len(missing))
        granted = missing[: len(frames)]
        results[missing] = Outcome.NO_SPACE
        results[granted] = Outcome.OK
        if len(frames):
            in_front = np.concatenate([prefix, keys[: granted[0]]])
            self._grants[call] = Grant(self, keys[granted], frames, depths[granted], in_front, use)
        return results, frames

    def _use_in_tiers(self, prefix: Keys, keys: Keys) -> None:
        """What memory serves is in use in the tiers, too, which have it for the time when memory has not. Without the
        state lock."""
        tiers = self.slab.parts.tiers
        if not tiers.is_empty:
            tiers.used_together(object_ids(np.concatenate([prefix, keys])))

    def _why_not(self, num_pages: int) -> Outcome | None:
        if self.slab.is_draining:
            return Outcome.UNAVAILABLE
        num_requests = len(self._grants) + len(self._reads) + len(self._lookups) + len(self._deletions)
        has_too_many = num_requests >= self.slab.parts.options.max_ops
        is_over = has_too_many or self._num_held() + num_pages > self.max_held_pages
        return Outcome.THROTTLED if is_over else None

    def _can_memory_tell(self, keys: Keys) -> bool:
        """Whether no tier has to be asked which of `keys` are there."""
        return self.slab.parts.tiers.is_empty or bool((self.slab.find(keys)[0] >= 0).all())

    def _num_held(self) -> int:
        """Frames that cannot be used for anything else because of this client."""
        num_granted = sum(len(grant.frames) for grant in self._grants.values())
        return num_granted + sum(read.num_frames() for read in self._reads.values())

    def _found_nothing(self, call: int, verb: ManagedVerb, count: int, reason: Outcome) -> None:
        results, frames = self._none(count, reason)
        self._count(verb, results)
        self._tell(Found(call, results, frames, np.empty(0, np.uint64)))

    def _none(self, count: int, reason: Outcome) -> tuple[Outcomes, I32]:
        return outcomes(count, reason), NO_FRAMES

    def _check_call(self, call: int) -> None:
        if self.is_ended:
            raise SessionClosed(f"store session {self.session_id} has ended")
        if not self.shortcut.take(call):
            raise BadRequest(Reject.BAD_OP, f"call {call} after call {self.shortcut.last}: numbers go up")

    def _check_keys(self, call: int, keys: Keys, limit: int) -> Keys:
        """The node's keys for them."""
        check_keys(keys)
        if not 1 <= len(keys) <= limit:
            raise BadRequest(Reject.BAD_LENGTH, f"{len(keys)} keys in one call; expected 1 to {limit}")
        self._check_call(call)
        return self._own_keys(keys)

    def _own_keys(self, keys: Keys) -> Keys:
        request = self.request
        return store_keys(request.tenant, request.namespace, request.page_bytes, np.ascontiguousarray(keys))

    def _check_prefix(self, prefix: Keys) -> Keys:
        """The node's keys for them."""
        check_keys(prefix)
        if len(prefix) > self.max_keys:
            raise BadRequest(Reject.BAD_LENGTH, f"a prefix of {len(prefix)} keys; expected at most {self.max_keys}")
        return self._own_keys(prefix) if len(prefix) else prefix

    def _check_pages(self, call: int, keys: Keys, depths: U32) -> Keys:
        if depths.shape != (len(keys),):
            raise BadRequest(Reject.BAD_LENGTH, f"{len(keys)} keys and {len(depths)} depths do not belong together")
        return self._check_keys(call, keys, self.max_pages)

    def _count(self, verb: ManagedVerb, results: Outcomes) -> None:
        count_outcomes(self.slab.parts.counters.managed_pages, results, verb)

    def _tell(self, answer: Answer) -> None:
        self.events.announce(OneAnswer(answer))
