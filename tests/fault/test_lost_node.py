"""A node that goes away under a working engine: shorter hits, counted; no exception, no wrong byte, no lost frame."""

from __future__ import annotations

import contextlib
import os
import select
from collections.abc import Callable

import pytest
from cachekernels.pages import object_ids

from cachesvc.client.base import I32, U32, Declined, Keys
from cachesvc.client.inprocess import InProcessClient
from cachesvc.node.events import Event
from cachesvc.node.node import Node
from cachesvc.node.parts import NodeOptions
from cachesvc.outcomes import Decline
from engine_plugin.hicache.config import PrefetchPolicy
from engine_plugin.hicache.prefetch import SILENCE_S
from storage_backends.base import StorageBackend
from storage_backends.memory.backend import open_backend
from tests.helpers.caches import PAGE, Rig, prompt
from tests.helpers.losable import LosableClient
from tests.helpers.stored_prompts import must_probe, stored
from tests.oracles.pages import ScriptedBackend

TOKENS = prompt(1, 12 * PAGE + 1)
OTHER = prompt(2, 8 * PAGE + 1)


def lost_rig(backend: StorageBackend, **changes: object) -> Rig:
    """A rig over a losable client. Its node has all pages of TOKENS in storage."""
    return Rig(client=LosableClient, backend=backend, options=NodeOptions(slice_pages=2), **changes)


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
    with lost_rig(backend) as rig:
        lose(rig.client)
        compute_everything(rig)
        assert rig.count("hicache_stored_pages_total") == 0
        assert rig.drops() == {}
        assert rig.count("hicache_deferred_pages_total") == 8
        assert rig.count('hicache_declined_total{verb="backup",reason="node_away"}') > 0


@WAYS
@pytest.mark.parametrize("policy", [PrefetchPolicy.TIMEOUT, PrefetchPolicy.WAIT_COMPLETE])
def test_in_the_middle_of_a_read(backend: ScriptedBackend, lose: Lose, policy: PrefetchPolicy) -> None:
    with lost_rig(backend, prefetch_policy=policy) as rig:
        handle = rig.open(TOKENS)
        assert rig.node.run_one()
        rig.cache.poll()
        assert not rig.cache.ready(handle)
        lose(rig.client)
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
        if rig.client.state == "away":
            rig.client.confirm()
            rig.cache.poll()
            assert rig.count("host_frames_quarantined") == 0
            rig.cache.check()


@WAYS
def test_in_the_middle_of_a_lookup(backend: ScriptedBackend, lose: Lose) -> None:
    with lost_rig(must_probe(backend)) as rig:
        handle = rig.open(TOKENS)
        assert not rig.cache.ready(handle)
        lose(rig.client)
        rig.cache.poll()
        assert rig.cache.ready(handle)
        assert rig.prefetch_ends() == {"miss": 1}
        assert rig.admit(handle)
        rig.prefill(handle)
        rig.cache.close(handle, TOKENS, "finished")
        compute_everything(rig)


@WAYS
def test_in_the_middle_of_a_backup(backend: ScriptedBackend, lose: Lose) -> None:
    with lost_rig(backend) as rig:
        rig.run(prompt(3, 8 * PAGE))
        rig.settle_host()
        assert rig.client.backups
        lose(rig.client)
        rig.cache.poll()
        assert rig.cache.idle()  # the frames are not locked any more
        assert rig.drops() == {}
        assert rig.count("hicache_deferred_pages_total") == 8
        compute_everything(rig)


def test_what_was_computed_without_a_node_is_stored_when_it_is_back(
    backend: ScriptedBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prefix before suffix, and no more at a time than the bound says, beside what is new."""
    monkeypatch.setattr("engine_plugin.hicache.backup.RESUMED_PAGES", 4)
    put: list[list[bytes]] = []
    backend.before["put"] = lambda ids: put.append([one.tobytes() for one in ids])
    with lost_rig(backend) as rig:
        rig.client.leave()
        for seed in (4, 5, 6):
            for num_pages in (3, 8):
                rig.run(prompt(seed, num_pages * PAGE + 1))
                rig.settle_host()
        assert rig.count("hicache_deferred_pages_total") == 24
        assert rig.cache.idle()
        rig.client.come_back()
        rig.cache.poll()
        assert 0 < sum(rig.client.backups.values()) <= 8, "a node's path, and no more"
        rig.settle()
        assert rig.count("hicache_stored_pages_total") == 24
        assert rig.drops() == {}
        order = {key: number for number, key in enumerate(key for batch in put for key in batch)}
        for seed in (4, 5, 6):
            keys = rig.tree.keys_after(rig.tree.match(TOKENS[:0]).node, prompt(seed, 8 * PAGE + 1))
            numbers = [order[one.tobytes()] for one in object_ids(keys)]
            assert numbers == sorted(numbers), "a prefix is stored before its suffix"


def test_what_was_evicted_meanwhile_is_not_offered(backend: ScriptedBackend) -> None:
    with lost_rig(backend) as rig:
        rig.client.leave()
        compute_everything(rig)
        assert rig.cache.flush().ok
        rig.client.come_back()
        rig.settle()
        assert rig.count("hicache_stored_pages_total") == 0
        assert not rig.client.backups


def test_a_node_that_answers_nothing_keeps_no_request_waiting(backend: ScriptedBackend) -> None:
    with lost_rig(backend, prefetch_policy=PrefetchPolicy.WAIT_COMPLETE) as rig:
        handle = rig.open(TOKENS)
        rig.client.fall_silent()
        assert not rig.cache.ready(handle)
        rig.clock.advance(SILENCE_S)
        assert rig.cache.ready(handle)
        rig.cache.close(handle, None, "aborted")
        compute_everything(rig)


def test_storage_that_appears_later_is_used() -> None:
    with Rig(client=NoTierYet, backend=open_backend({})) as rig:
        rig.run(TOKENS)
        rig.settle()
        assert not rig.drops()  # there was nothing below that they could have gone to
        assert rig.count("hicache_stored_pages_total") == 0
        rig.client.has_tier = True
        rig.run(OTHER)
        rig.settle()
        assert rig.count("hicache_stored_pages_total") == 8


@pytest.mark.parametrize("reason", [Decline.NODE_SILENT, Decline.OUTPUT_FULL, Decline.QUEUE_FULL])
def test_a_decline_that_passes_is_tried_again_when_an_op_ends(reason: Decline) -> None:
    with Rig(client=BusyClient, backend=open_backend({})) as rig:
        rig.run(TOKENS)
        rig.settle_host()
        rig.client.reason = reason
        rig.run(OTHER)
        rig.settle_host()
        assert not rig.drops()
        rig.client.reason = None
        rig.settle()
        assert rig.count("hicache_stored_pages_total") == 20
        assert not rig.drops()


def test_news_with_no_op_under_way_is_taken_in_so_that_the_engine_can_sleep_again() -> None:
    with Rig(client=ChattyClient) as rig:
        os.eventfd_write(rig.client.news, 1)
        assert select.select([rig.cache.fileno()], [], [], 0)[0]
        rig.cache.poll()
        assert not select.select([rig.cache.fileno()], [], [], 0)[0]
    os.close(rig.client.news)


class ChattyClient(InProcessClient):
    """Its descriptor is readable when the connection has news, as well."""

    def __init__(self, node: Node) -> None:
        super().__init__(node)
        self.news = os.eventfd(0, os.EFD_NONBLOCK)

    def fileno(self) -> int:
        return self.news

    def poll(self) -> list[Event]:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self.news)
        return super().poll()


class BusyClient(InProcessClient):
    """Declines backups as long as there is a reason to."""

    reason: Decline | None = None

    def backup(self, keys: Keys, frames: I32, depths: U32) -> int | Declined:
        return super().backup(keys, frames, depths) if self.reason is None else Declined(self.reason)


class NoTierYet(InProcessClient):
    """As a node without storage answers, until it is another node."""

    has_tier = False

    def backup(self, keys: Keys, frames: I32, depths: U32) -> int | Declined:
        return super().backup(keys, frames, depths) if self.has_tier else Declined(Decline.NO_TIER)
