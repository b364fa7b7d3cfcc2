"""A node that goes away under a working engine: shorter hits, counted; no exception, no wrong byte, no lost frame.

The client stands between the cache and a node in this process. `leave` makes it a client whose connection has ended,
`end_session` one whose every call raises, `fall_silent` one that accepts ops and answers none.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from cachesvc.client.base import I32, U32, Declined, Keys, Lookup, SessionClosed
from cachesvc.client.inprocess import InProcessClient
from cachesvc.node.events import Event, OpEnded, PagesRead, PagesStored
from cachesvc.node.node import Node
from cachesvc.node.parts import NodeOptions
from cachesvc.node.tiers import Tier
from cachesvc.outcomes import Decline, OpEnd
from engine_plugin.hicache.config import PrefetchPolicy
from engine_plugin.hicache.prefetch import SILENCE_S
from storage_backends.base import Outcome, StorageBackend, outcomes
from storage_backends.memory.backend import open_backend
from tests.helpers.caches import PAGE, Rig, prompt
from tests.oracles.pages import ScriptedBackend
from tests.unit.test_controller_prefetch import must_probe, stored

TOKENS = prompt(1, 12 * PAGE + 1)
OTHER = prompt(2, 8 * PAGE + 1)


class LosableClient(InProcessClient):
    """Knows the ops the node has not ended, as the client of a connection does."""

    def __init__(self, node: Node) -> None:
        super().__init__(node)
        self.reads: dict[int, int] = {}  # op -> pages
        self.backups: dict[int, int] = {}
        self.lookups: set[int] = set()
        self.state = "here"
        self._told: list[Event] = []

    def leave(self) -> None:
        """The connection ends: backups are over at once, reads only when `confirm` says so."""
        self.state = "away"
        for op, num_pages in self.backups.items():
            self._told += [PagesStored(op, 0, outcomes(num_pages, Outcome.UNAVAILABLE)), OpEnded(op, OpEnd.LOST)]
        self._told += [OpEnded(op, OpEnd.LOST) for op in self.lookups]

    def confirm(self) -> None:
        """The node writes nothing any more."""
        for op, num_pages in self.reads.items():
            self._told += [PagesRead(op, 0, outcomes(num_pages, Outcome.UNAVAILABLE)), OpEnded(op, OpEnd.LOST)]

    def end_session(self) -> None:
        self.state = "closed"

    def fall_silent(self) -> None:
        self.state = "silent"

    def publish(self, frames: I32) -> None:
        if self._is_here():
            super().publish(frames)

    def lookup(self, keys: Keys) -> Lookup:
        if not self._is_here():
            return Lookup(0)
        lookup = super().lookup(keys)
        if lookup.pending_op is not None:
            self.lookups.add(lookup.pending_op)
        return lookup

    def prefetch(self, keys: Keys, frames: I32, depths: U32) -> int | Declined:
        if not self._is_here():
            return Declined(Decline.NODE_AWAY)
        answer = super().prefetch(keys, frames, depths)
        assert isinstance(answer, int)
        self.reads[answer] = len(keys)
        return answer

    def backup(self, keys: Keys, frames: I32, depths: U32) -> int | Declined:
        if not self._is_here():
            return Declined(Decline.NODE_AWAY)
        answer = super().backup(keys, frames, depths)
        assert isinstance(answer, int)
        self.backups[answer] = len(keys)
        return answer

    def cancel(self, op: int) -> None:
        if self._is_here():
            super().cancel(op)

    def poll(self) -> list[Event]:
        if self._is_here():
            return super().poll()
        told, self._told = self._told, []
        return told

    def drain(self, timeout_s: float) -> int:
        return super().drain(timeout_s) if self._is_here() else 0

    def _is_here(self) -> bool:
        if self.state == "closed":
            raise SessionClosed("the session is over")
        return self.state == "here"


class Lost:
    """A rig over a losable client. Its node has all pages of TOKENS in storage."""

    def __init__(self, backend: StorageBackend, **changes: object) -> None:
        node = Node([Tier("storage", backend)], manual=True, options=NodeOptions(slice_pages=2))
        self.client = LosableClient(node)
        self.rig = Rig(client=self.client, node=node, **changes)
        self.rig.owns_node = True


@pytest.fixture
def backend() -> ScriptedBackend:
    return ScriptedBackend(stored(open_backend({}), TOKENS))


def compute_everything(rig: Rig) -> None:
    """The engine serves on: requests are admitted, their KV is right, host memory still works."""
    rig.settle_host()
    rig.cache.check()
    first = rig.run(OTHER)
    rig.settle_host()
    rig.forget_device()
    second = rig.run(OTHER)
    assert (first.total, second.host) == (0, 8 * PAGE)
    rig.settle_host()
    rig.cache.check()


WAYS = pytest.mark.parametrize("lose", [LosableClient.leave, LosableClient.end_session], ids=["away", "closed"])
Lose = Callable[[LosableClient], None]


@WAYS
def test_with_nothing_under_way(backend: ScriptedBackend, lose: Lose) -> None:
    lost = Lost(backend)
    with lost.rig as rig:
        lose(lost.client)
        compute_everything(rig)
        assert rig.count("hicache_stored_pages_total") == 0
        assert rig.drops() == {"backup_declined": 8}
        assert rig.count('hicache_declined_total{verb="backup",reason="node_away"}') > 0


@WAYS
@pytest.mark.parametrize("policy", [PrefetchPolicy.TIMEOUT, PrefetchPolicy.WAIT_COMPLETE])
def test_in_the_middle_of_a_read(backend: ScriptedBackend, lose: Lose, policy: PrefetchPolicy) -> None:
    lost = Lost(backend, prefetch_policy=policy)
    with lost.rig as rig:
        handle = rig.open(TOKENS)
        assert rig.node.run_one()
        rig.cache.poll()
        assert not rig.cache.ready(handle)
        lose(lost.client)
        rig.cache.poll()
        assert not rig.cache.ready(handle)
        rig.clock.advance(SILENCE_S)
        assert rig.cache.ready(handle)
        assert rig.admit(handle)
        assert handle.cached.storage == 2 * PAGE  # what had arrived is used
        rig.prefill(handle)
        rig.cache.close(handle, TOKENS, "finished")
        assert rig.count("host_frames_quarantined") == 10  # somebody may still write them
        compute_everything(rig)
        assert rig.count("host_frames_quarantined") == 10
        if lost.client.state == "away":
            lost.client.confirm()
            rig.cache.poll()
            assert rig.count("host_frames_quarantined") == 0
            rig.cache.check()


@WAYS
def test_in_the_middle_of_a_lookup(backend: ScriptedBackend, lose: Lose) -> None:
    lost = Lost(must_probe(backend))
    with lost.rig as rig:
        handle = rig.open(TOKENS)
        assert not rig.cache.ready(handle)
        lose(lost.client)
        rig.cache.poll()
        assert rig.cache.ready(handle)
        assert rig.prefetch_ends() == {"miss": 1}
        assert rig.admit(handle)
        rig.prefill(handle)
        rig.cache.close(handle, TOKENS, "finished")
        compute_everything(rig)


@WAYS
def test_in_the_middle_of_a_backup(backend: ScriptedBackend, lose: Lose) -> None:
    lost = Lost(backend)
    with lost.rig as rig:
        rig.run(prompt(3, 8 * PAGE))
        rig.settle_host()
        assert lost.client.backups
        lose(lost.client)
        rig.cache.poll()
        assert rig.cache.idle()  # the frames are not locked any more
        assert rig.drops() == {"backup_failed": 8}
        compute_everything(rig)


def test_a_node_that_answers_nothing_keeps_no_request_waiting(backend: ScriptedBackend) -> None:
    lost = Lost(backend, prefetch_policy=PrefetchPolicy.WAIT_COMPLETE)
    with lost.rig as rig:
        handle = rig.open(TOKENS)
        lost.client.fall_silent()
        assert not rig.cache.ready(handle)
        rig.clock.advance(SILENCE_S)
        assert rig.cache.ready(handle)
        rig.cache.close(handle, None, "aborted")
        compute_everything(rig)


def test_storage_that_appears_later_is_used() -> None:
    backend = open_backend({})
    node = Node([Tier("storage", backend)], manual=True)
    client = NoTierYet(node)
    with Rig(client=client, node=node) as rig:
        rig.owns_node = True
        rig.run(TOKENS)
        rig.settle()
        assert not rig.drops()  # there was nothing below that they could have gone to
        assert rig.count("hicache_stored_pages_total") == 0
        client.has_tier = True
        rig.run(OTHER)
        rig.settle()
        assert rig.count("hicache_stored_pages_total") == 8


class NoTierYet(InProcessClient):
    """As a node without storage answers, until it is another node."""

    has_tier = False

    def backup(self, keys: Keys, frames: I32, depths: U32) -> int | Declined:
        return super().backup(keys, frames, depths) if self.has_tier else Declined(Decline.NO_TIER)
