"""`Node`: the whole service as a library. The verbs, each a few lines; the rest of the package does the work."""

from __future__ import annotations

import itertools
import logging
import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from cachekernels.index import PageIndex
from cachekernels.pages import object_ids
from numpy.typing import NDArray

from cachesvc.client.base import MAX_USED_PAGES, AttachRefused, AttachRequest, Declined, Lookup, SessionClosed
from cachesvc.clock import Clock, SystemClock
from cachesvc.metrics import Registry
from cachesvc.node.arguments import check_keys, check_pages
from cachesvc.node.attach import Roster, check_geometry, why_off
from cachesvc.node.audit import Audit
from cachesvc.node.backup import BackupOp
from cachesvc.node.counters import NodeCounters
from cachesvc.node.demotion import Demotions
from cachesvc.node.descriptors import OPENING, SESSION, Descriptors
from cachesvc.node.events import Event
from cachesvc.node.flights import Flights
from cachesvc.node.hand_over import HandOver, StillBusy
from cachesvc.node.kept import KeptRegions
from cachesvc.node.lookup import ProbeOp, num_known
from cachesvc.node.managed import ManagedMemory
from cachesvc.node.parts import NodeOptions, Parts
from cachesvc.node.prefetch import PrefetchOp
from cachesvc.node.promotion import Promotions
from cachesvc.node.regions import SharedPages
from cachesvc.node.report import NodeReport, report_regions, report_sessions
from cachesvc.node.sessions import NO_PEER, FrameSession, Grant, Session
from cachesvc.node.tiers import Tier, TierChain
from cachesvc.node.workers import ManualPool, ThreadPool
from cachesvc.outcomes import AttachResult, Decline, OpEnd, RegionDrop, Verb

logger = logging.getLogger(__name__)

I32 = NDArray[np.int32]
U32 = NDArray[np.uint32]
Keys = NDArray[np.uint8]


@dataclass(frozen=True)
class Health:
    """`is_ready` is False while every worker has been on one slice for too long, or the node is going away."""

    is_ready: bool
    reasons: tuple[str, ...]


class Node:
    """A node in this process.

    Owns its tiers' backends, regions, index and worker threads, all of which `close` ends. All verbs may come from
    any thread; those of one session from one thread at a time.
    """

    def __init__(
        self,
        tiers: Sequence[Tier] = (),
        *,
        options: NodeOptions | None = None,
        clock: Clock | None = None,
        manual: bool = False,
        descriptors: Descriptors | None = None,
    ) -> None:
        """`manual`: no threads; `run_one` does the work. For tests that decide the order of everything. `descriptors`:
        default: this process's."""
        self.boot_id = os.urandom(16)  # sessions of another node are none of this one's
        self.registry = Registry()
        self.options = options or NodeOptions()
        self.tier_names = tuple(tier.name for tier in tiers)
        self._clock = clock or SystemClock()
        self._counters = NodeCounters(self.registry, [tier.name for tier in tiers])
        self._roster = Roster()
        self._ids = itertools.count(1)
        self._is_closing = False
        chain = TierChain(tiers, self._counters, self._clock)
        on_exception = self._counters.worker_exceptions.inc
        self._manual = ManualPool(self._clock, on_exception) if manual else None
        pages = SharedPages(PageIndex())
        state = threading.Condition()
        pool = self._manual or ThreadPool(self._clock, on_exception, self.options.num_workers)
        self._parts = Parts(
            state=state,
            pool=pool,
            reads=Flights(),
            writes=Flights(),
            pages=pages,
            kept=KeptRegions(pages, self._counters, self._clock, self.options.keep_regions_s),
            tiers=chain,
            promotions=Promotions(),
            demotions=Demotions(chain, pool, self._counters, state, self.options.max_demoted_bytes),
            counters=self._counters,
            clock=self._clock,
            options=self.options,
        )
        self.descriptors = descriptors or Descriptors()
        self._hand_over = HandOver(self._parts, self._roster, self.descriptors)
        self.managed = ManagedMemory(self._parts, self._hand_over, self._ids)
        self._hand_over.share_with(self.managed.drop_unused, self.managed.regions)
        self._audit = Audit(self._parts, self._roster, self.managed)
        self._add_gauges()

    @property
    def counters(self) -> NodeCounters:
        """The node's counters, for whoever counts along."""
        return self._counters

    def attach(self, request: AttachRequest, *, peer: int = NO_PEER, waits: bool = True) -> Session:
        """Opens a session with a region of its own: a new one, or one with a past (see `AttachRequest`). Blocks while
        memory is cleared or a directory is read, and for ops of the session before. `peer`: a pidfd of the engine's
        process (it stays the caller's), NO_PEER or UNSEEN. AttachRefused: see its message. Without `waits`, StillBusy
        instead of waiting for anybody: it is not counted, as the caller asks again."""
        try:
            session = self._attach(request, peer, waits)
        except StillBusy:
            raise
        except AttachRefused as refused:
            self._counters.attaches.inc(1, refused.result)
            raise
        self._counters.attaches.inc(1, AttachResult.ATTACHED if session.is_enabled else AttachResult.OFF)
        region = session.region
        logger.info(
            "session %d: %s attached, %d frames of %d bytes, %.2f GiB",
            session.session_id,
            request.group,
            region.num_frames,
            region.frame_bytes,
            region.num_frames * region.stride_bytes / 2**30,
        )
        return session

    def publish(self, session: Session, frames: I32) -> None:
        """The engine wrote these frames, records and generations included. ValueError: not frames of its region."""
        self._check_open(session)
        if session.is_enabled and len(frames):
            session.check_frames(frames)
            self._counters.published.inc(self._parts.pages.publish(session.slot, frames))

    def lookup(self, session: Session, keys: Keys) -> Lookup:
        """Leading pages of `keys` that can be had; more may follow as `LookupDone` where a tier has to be asked."""
        self._check_open(session)
        check_keys(keys)
        if not session.is_enabled or not len(keys):
            return Lookup(0)
        must_probe = self._parts.tiers.must_probe
        num_pages = num_known(session, keys)
        if num_pages == len(keys):
            return Lookup(num_pages)
        with self._parts.state:
            reason = self._why_not(session) if must_probe else None
            if must_probe and reason is None:
                probe = ProbeOp(next(self._ids), session, keys.copy(), num_pages)
                session.ops[probe.op_id] = probe
                self._parts.pool.submit(probe)
                return Lookup(num_pages, probe.op_id)
        if reason is not None:
            self._counters.declined.inc(1, Verb.LOOKUP, reason)
        self._counters.lookup_pages.inc(len(keys) - num_pages, "miss")
        return Lookup(num_pages)

    def used(self, session: Session, keys: Keys) -> None:
        """Pages that the engine has in its own memory are in use. See `CacheClient.used`."""
        self._check_open(session)
        check_keys(keys)
        if session.is_enabled and len(keys):
            self._parts.tiers.used_together(object_ids(keys[:MAX_USED_PAGES]))

    def holds(self, keys: Keys) -> NDArray[np.bool_]:
        """bool[n]: which pages are in regions, or in tiers that know without I/O. For tools: counts nothing."""
        check_keys(keys)
        return self._parts.pages.held(keys) | self._parts.tiers.known(object_ids(keys))

    def prefetch(self, session: Session, keys: Keys, frames: I32, depths: U32) -> int | Declined:
        """Lends `frames` to the node and starts reading. See `CacheClient.prefetch`."""
        self._check_open(session)
        check_pages(keys, frames, depths)
        with self._parts.state:
            reason = self._why_not(session)
            if reason is not None:
                return self._decline(Verb.PREFETCH, reason)
            session.lend(frames)
            op = PrefetchOp(next(self._ids), session, keys.copy(), frames.copy(), depths.copy())
            session.ops[op.op_id] = op
            self._parts.pool.submit(op)
            return op.op_id

    def backup(self, session: Session, keys: Keys, frames: I32, depths: U32) -> int | Declined:
        """Queues pages to be stored. See `CacheClient.backup`."""
        self._check_open(session)
        check_pages(keys, frames, depths)
        session.check_frames(frames)
        with self._parts.state:
            reason = self._why_not_store(session, len(keys))
            if reason is not None:
                return self._decline(Verb.BACKUP, reason)
            op = BackupOp(next(self._ids), session, keys.copy(), frames.copy(), depths.copy())
            session.ops[op.op_id] = op
            session.lane.append(op)
            return op.op_id

    def cancel(self, session: Session, op_id: int) -> None:
        """Gives up an op of this session; unknown and ended ones are left alone."""
        self._check_open(session)
        with self._parts.state:
            op = session.ops.get(op_id)
            if op is not None:
                op.give_up(OpEnd.CANCELLED)

    def poll(self, session: Session) -> list[Event]:
        """Events since the last call. Never blocks."""
        self._check_open(session)
        return session.events.poll()

    def drain(self, session: Session, timeout_s: float) -> int:
        """Gives up reads, waits for stores until `timeout_s` are over, drops the rest. Returns the ops that had to be
        given up late."""
        self._check_open(session)
        return self._drain(session, self._clock.now() + timeout_s)

    def detach(self, session: Session) -> None:
        """Ends a session at once. Its region is kept for a successor, or goes, when the last slice on it has ended.
        Idempotent."""
        with self._parts.state:
            if not session.is_detached:
                self._roster.leave(session)
                session.end(OpEnd.DETACHED)

    def lost(self, session: Session) -> None:
        """The connection to the engine broke, which says nothing about the engine. Its ops are given up; its pages go
        on serving others, and its region is nobody else's until the engine comes back for it or is proven dead.
        Idempotent."""
        with self._parts.state:
            if session.is_closed:
                return
            self._counters.sessions_lost.inc()
            session.lose()

    def tick(self) -> None:
        """What time brings: looks for the death of lost engines, drops regions kept for too long, and checks that
        nothing leaks while the node is idle. Twice a second is often enough. One thread at a time."""
        self._hand_over.prove_deaths()
        self._hand_over.drop_expired()
        self._hand_over.lock_kept()
        self._parts.tiers.ask_again()
        self.managed.tick()
        self._audit.run()

    def health(self) -> Health:
        """From progress, not from threads being alive."""
        num_stuck = sum(seconds >= self.options.stuck_after_s for seconds in self._parts.pool.busy_seconds())
        reasons = ["the node is closing"] if self._is_closing else []
        if num_stuck:
            reasons.append(f"{num_stuck} of {self._parts.pool.num_workers} workers are stuck on one slice")
        is_ready = not self._is_closing and num_stuck < self._parts.pool.num_workers
        return Health(is_ready, tuple(reasons))

    def report(self) -> NodeReport:
        """Sessions, regions and tiers as they are now; no I/O."""
        with self._parts.state:
            sessions = report_sessions(self._roster)
            regions = report_regions(self._roster, self._parts.kept, self.managed.slabs())
        tiers = [] if self._is_closing else self._parts.tiers.reports(self.options.stuck_after_s)
        return NodeReport(sessions, regions, tuple(tiers))

    def run_one(self) -> bool:
        """Only with `manual`: runs the next slice on this thread. False: none may run now."""
        if self._manual is None:
            raise RuntimeError("run_one is for nodes made with manual=True")
        return self._manual.run_one()

    def close(self, timeout_s: float = 10.0) -> int:
        """Drains all sessions within `timeout_s`, detaches them, ends the workers, closes the tiers. Idempotent.

        Returns how many accepted pages were not stored. A worker stuck in a tier is left behind; the tiers are then
        closed when it comes back.
        """
        with self._parts.state:
            if self._is_closing:
                return 0
            self._is_closing = True
            sessions = list(self._roster)
            kept = self._parts.kept.keep_no_more()
        for region in kept:
            self._parts.kept.drop(region, RegionDrop.NODE_CLOSED)
        unsaved_before = self._num_unsaved()
        deadline_s = self._clock.now() + timeout_s
        for session in sessions:
            if not session.is_lost:
                self._drain(session, deadline_s)
            self.detach(session)
        for slab in self.managed.slabs():
            self._drain(slab, deadline_s)
        self.managed.close()
        with self._parts.state:
            self._parts.pool.wait_for(self._parts.state, lambda: self._parts.demotions.is_idle, deadline_s)
        stuck = self._parts.pool.close(deadline_s, self._parts.tiers.close)
        self._parts.demotions.give_up()
        if stuck:
            logger.error("%d workers are stuck in a tier and were left behind", stuck)
        return int(self._num_unsaved() - unsaved_before)

    def __enter__(self) -> Node:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _attach(self, request: AttachRequest, peer: int, waits: bool) -> Session:
        check_geometry(request)
        self._hand_over.prove_deaths()
        self._hand_over.ensure_descriptors(SESSION + OPENING, request.group)
        with self._parts.state:
            self._check_attach(request)
        warning = why_off(request)
        grant = self._hand_over.create_unmanaged(request) if warning else self._hand_over.grant(request, waits=waits)
        try:
            return self._enter(request, grant, warning, peer)
        except AttachRefused:
            self._hand_over.back(grant, request)
            raise

    def _enter(self, request: AttachRequest, grant: Grant, warning: str, peer: int) -> Session:
        with self._parts.state:
            # Once more: the memory took its time, and somebody else may have attached meanwhile.
            self._check_attach(request)
            self._roster.check_region(grant.region)
            own_peer = os.dup(peer) if peer >= 0 else peer
            session = Session(next(self._ids), request, self._parts, grant, warning, own_peer)
            self._roster.enter(session)
            return session

    def _check_attach(self, request: AttachRequest) -> None:
        if self._is_closing:
            raise AttachRefused("the node is closing", AttachResult.REFUSED_DRAINING)
        self._roster.check(request)

    def _check_open(self, session: Session) -> None:
        if session.is_closed:
            raise SessionClosed(f"session {session.session_id} is {'detached' if session.is_detached else 'lost'}")

    def _why_not(self, session: Session) -> Decline | None:
        if not session.is_enabled:
            return Decline.CACHE_OFF
        if session.is_draining:
            return Decline.DRAINING
        if len(session.ops) >= self.options.max_ops:
            return Decline.TOO_MANY_OPS
        return None

    def _why_not_store(self, session: Session, num_pages: int) -> Decline | None:
        if not self._parts.tiers.can_write:
            return Decline.NO_TIER
        limit = self.options.waiting_store_limit(session.region.num_frames)
        if session.lane.waiting_pages + num_pages > limit:
            return self._why_not(session) or Decline.QUEUE_FULL
        return self._why_not(session)

    def _decline(self, verb: Verb, reason: Decline) -> Declined:
        self._counters.declined.inc(1, verb, reason)
        return Declined(reason)

    def _drain(self, session: FrameSession, deadline_s: float) -> int:
        with self._parts.state:
            session.begin_draining()
            for op in session.unfinished():
                if op.verb is not Verb.BACKUP:
                    op.give_up(OpEnd.DRAINED)
            self._parts.pool.wait_for(self._parts.state, lambda: not session.unfinished(), deadline_s)
            left = session.unfinished()
            session.give_up_all(OpEnd.DRAINED)
            return len(left)

    def _num_unsaved(self) -> float:
        return sum(sample.value for sample in self._counters.unsaved_pages.samples())

    def _add_gauges(self) -> None:
        add, add_labelled, parts = self.registry.gauge, self.registry.gauges, self._parts
        add("cachesvc_sessions", "Attached sessions", lambda: len(self._roster))
        add_labelled("cachesvc_regions", "Regions, by who manages them", "state", self._region_states)
        add("cachesvc_index_keys", "Pages in the index", lambda: parts.pages.counts()[0])
        add("cachesvc_index_bytes", "Memory of the index", lambda: parts.pages.counts()[1])
        add_labelled("cachesvc_frames", "Frames of all regions, by what the node does with them", "state", self._frames)
        add_labelled("cachesvc_directory_frames", "Frames of all regions, as last counted", "state", self._audit.frames)
        add_labelled(
            "cachesvc_conservation_broken", "Rules broken when the node was last idle", "rule", self._audit.broken
        )
        add_labelled("cachesvc_waiting", "Ops and lanes waiting for a worker", "kind", parts.pool.waiting)
        add_labelled("cachesvc_tier_used_bytes", "Space used by each tier", "tier", self._tier_usage)
        self.registry.gauge_table(
            "cachesvc_tier_layers",
            "What the layers of each tier declined, repeated and gave up since the start; what ends in _now is a state",
            ("tier", "what"),
            parts.tiers.tallies,
        )
        add("cachesvc_store_sessions", "Clients of node-managed memory", self.managed.num_sessions)
        add("cachesvc_managed_bytes", "Memory of all slabs", self.managed.used_bytes)
        add_labelled("cachesvc_managed_frames", "Frames of all slabs by state", "state", self.managed.frames)
        add("cachesvc_ready", "1 while the node makes progress", lambda: float(self.health().is_ready))

    def _frames(self) -> dict[str, float]:
        with self._parts.state:
            sessions = [*self._roster, *self._roster.leaving()]
            lent = sum(int(np.count_nonzero(session.is_lent)) for session in sessions)
            quarantined = sum(session.num_quarantined() for session in sessions)
            total = sum(session.region.num_frames for session in sessions)
        return {"total": total, "lent": lent - quarantined, "quarantined": quarantined}

    def _region_states(self) -> dict[str, float]:
        with self._parts.state:
            num_lost = sum(session.is_lost for session in self._roster)
            return {"attached": len(self._roster) - num_lost, "lost": num_lost, "kept": len(self._parts.kept)}

    def _tier_usage(self) -> dict[str, float]:
        return self._parts.tiers.usage() if not self._is_closing else self._parts.tiers.no_usage()
