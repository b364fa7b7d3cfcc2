"""A region with pages from before: what the next engine makes of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from cachekernels.region import Region, copy_frames

from cachesvc.client.base import Attachment, AttachRequest
from cachesvc.client.inprocess import InProcessClient
from cachesvc.node.node import Node
from cachesvc.node.parts import NodeOptions
from storage_backends.memory.backend import open_backend
from tests.helpers.caches import PAGE, Rig, prompt
from tests.oracles.pages import ScriptedBackend

PAGES = 12
TOKENS = prompt(1, PAGES * PAGE + 1)


class KeptRegionClient(InProcessClient):
    """Hands out a region in which `before` has been."""

    def __init__(self, node: Node, before: Callable[[Region], None]) -> None:
        super().__init__(node)
        self._before = before

    def attach(self, request: AttachRequest) -> Attachment:
        attachment = super().attach(request)
        self._before(attachment.region)
        return replace(attachment, has_pages=True)


def left_by(engine: Rig) -> Callable[[Region], None]:
    """Everything that `engine` has on host, in the same frames, its times of last use included."""

    def copy(target: Region) -> None:
        records = engine.region.records()
        frames = np.flatnonzero(records.generations % 2 == 0).astype(np.int32)
        frames = frames[records.generations[frames] > 0]
        generations = engine.region.snapshot(frames, records.keys[frames])
        keys, depths = records.keys[frames], records.depths[frames]
        assert copy_frames(engine.region, frames, generations, target, frames, keys, depths).all()
        for frame in frames.tolist():
            target.touch(np.array([frame], np.int32), int(records.last_use[frame]))

    return copy


def restarted(before: Callable[[Region], None], **changes: object) -> Rig:
    """An engine that gets a region in which `before` has been."""
    return Rig(client=lambda node: KeptRegionClient(node, before), **changes)


def test_a_successor_gets_what_the_node_kept() -> None:
    with Node([], manual=True, options=NodeOptions(keep_regions_s=300.0)) as node:
        with Rig(node=node) as engine:
            engine.run(TOKENS)
            engine.settle()
        with Rig(node=node) as rig:
            assert rig.run(TOKENS).host == PAGES * PAGE
            rig.settle()
            rig.cache.check()


def kept(rig: Rig, what: str) -> float:
    return rig.count(f'hicache_kept_frames_total{{what="{what}"}}')


@pytest.fixture
def engine():
    with Rig() as rig:
        rig.run(TOKENS)
        rig.settle()
        yield rig


def test_the_first_request_after_a_restart_hits_the_pages_on_host(engine: Rig) -> None:
    with restarted(left_by(engine)) as rig:
        assert (kept(rig, "taken_over"), rig.count("host_frames_orphaned")) == (PAGES, PAGES)
        rig.cache.check()
        cached = rig.run(TOKENS)  # every byte is compared
        assert (cached.device, cached.host, cached.storage) == (0, PAGES * PAGE, 0)
        assert rig.count("host_frames_orphaned") == 0
        assert rig.count("hicache_adopted_pages_total") == PAGES
        rig.settle()
        rig.cache.check()
        assert rig.transfer.num_stored_pages == 0  # they are on host already


def test_a_prompt_too_short_to_be_fetched_finds_its_page_too(engine: Rig) -> None:
    with restarted(left_by(engine)) as rig:
        assert rig.run(TOKENS[: PAGE + 1]).host == PAGE
        assert rig.count("hicache_adopted_pages_total") == 1


def test_what_was_used_last_stays_longest_across_a_restart() -> None:
    with Rig() as engine:
        for seed in (1, 2, 3):
            engine.run(prompt(seed, 8 * PAGE + 1))
            engine.settle()
            engine.wall_s += 1
        engine.forget_device()
        engine.run(prompt(1, 8 * PAGE + 1))  # read from host: 2 is the oldest now
        with restarted(left_by(engine), num_host_frames=24) as rig:
            rig.run(prompt(4, 16 * PAGE + 1))
            rig.settle()
            cached = [rig.tree.match(prompt(seed, 8 * PAGE + 1), adopt=True).num_pages for seed in (1, 2, 3)]
            assert cached == [8, 0, 0]


def test_a_region_without_pages_is_just_free(engine: Rig) -> None:
    with restarted(lambda region: None) as rig:
        assert rig.count("host_frames_free") == rig.region.num_frames
        rig.cache.check()


def test_frames_that_were_being_written_and_second_copies_are_free(engine: Rig) -> None:
    def damage(region: Region) -> None:
        left_by(engine)(region)
        records = region.records()
        spare = np.flatnonzero(records.generations == 0)[:2].astype(np.int32)
        region.begin_write(spare)
        region.write_records(spare, records.keys[:2], records.depths[:2])  # the keys of frames 0 and 1 again
        region.commit(spare)
        region.begin_write(np.array([PAGES - 1], np.int32))

    with restarted(damage) as rig:
        assert (kept(rig, "taken_over"), kept(rig, "duplicate"), kept(rig, "unfinished")) == (PAGES - 1, 2, 1)
        assert rig.count("host_frames_free") == rig.region.num_frames - (PAGES - 1)
        rig.cache.check()


def test_pages_nobody_asks_for_make_room_for_new_ones(engine: Rig) -> None:
    with restarted(left_by(engine)) as rig:
        for seed in range(2, 7):
            rig.run(prompt(seed, 12 * PAGE + 1))
            rig.settle()
            rig.cache.check()
        assert rig.count("host_frames_orphaned") == 4  # 64 frames, 60 of them for the new ones
        assert rig.count('hicache_evicted_pages_total{tier="host"}') == 0
        assert rig.run(TOKENS).total == 4 * PAGE  # the deepest went first


def test_a_flush_empties_orphans_too(engine: Rig) -> None:
    with restarted(left_by(engine)) as rig:
        assert rig.cache.flush().ok
        assert rig.count("host_frames_free") == rig.region.num_frames
        assert rig.run(TOKENS).total == 0


def test_adopted_pages_reach_storage_and_those_it_has_are_not_written_again(engine: Rig) -> None:
    backend = open_backend({})
    with Rig(backend=ScriptedBackend(backend, persistent=True)) as before:
        before.run(TOKENS[: 8 * PAGE + 1])
        before.settle()
        before.backend.close = lambda: None  # type: ignore[union-attr, method-assign]
    with restarted(left_by(engine), backend=backend) as rig:
        rig.run(TOKENS)
        rig.settle()
        assert rig.count("hicache_stored_pages_total") == PAGES  # all of them are known to be there now
        assert rig.count('cachesvc_stored_pages_total{outcome="exists"}') == 8
        assert rig.count('cachesvc_stored_pages_total{outcome="ok"}') == PAGES - 8
