"""One rank of an engine, as a process of its own.

    python -m tests.engines.sglang.rank ADDRESS OTHER_ADDRESS MEETING RANK SCENARIO...

In each scenario it computes, stores, forgets and fetches the same tokens as the other rank, with KV of its own. Prints,
by scenario, {"fetched": tokens, "wrong_rows": rows of the device that are not this rank's, "refused": pages that its
node did not take}. At OTHER_ADDRESS is a node for rank 1 where its own memory matters.
"""

from __future__ import annotations

import json
import sys
from contextlib import ExitStack
from datetime import timedelta
from typing import Any

import numpy as np
import torch.distributed as dist

from cachesvc.client.store import Outcome, Store, connect_store
from tests.engines.sglang.plugin import sglang_on_cpu

sglang_on_cpu.install()

from tests.engines.sglang import media  # noqa: E402
from tests.engines.sglang.rig import HANG_S, CacheRig, Model, Storage, kv_of  # noqa: E402
from tests.engines.sglang.state_rig import StateRig  # noqa: E402

RANKS = 2
MODEL = Model(layers=4, dim=64)
TOKENS = list(range(1000, 1128))
PAGE_BYTES = MODEL.page_size * MODEL.layers * 2 * MODEL.heads * MODEL.dim * MODEL.dtype.itemsize
LOST = {"page_missing": (5,), "pages_lost": (6, 7)}
"""Pages that rank 1 lost, by scenario."""
LOST_LATER = 5
"""The page that rank 1 loses between query and read, where it does."""
STATES_LOST = (6, 4)
"""At how many pages each rank loses its state of those at two, four and six, where it does."""
ROOM = {"no_room": 0, "some_room": 3}
"""Pages for which the node of rank 1 has room, by scenario, of the eight."""
FRAMES = 16


def main(address: str, other: str, meeting: str, rank: int, scenarios: list[str]) -> None:
    patience = timedelta(seconds=4 * HANG_S)
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=RANKS, timeout=patience)
    print(json.dumps({scenario: play(scenario, address, other, rank) for scenario in scenarios}), flush=True)
    dist.destroy_process_group()


def play(scenario: str, address: str, other: str, rank: int) -> dict[str, int]:
    """One scenario; rank 1 is the odd one."""
    is_odd_one = rank == 1
    if scenario == "one_without_storage" and is_odd_one:
        address = f"{address}.nobody"
    with ExitStack() as stack:
        if scenario in ROOM and is_odd_one:
            address = other
            stack.enter_context(squatters(address, scenario, FRAMES - ROOM[scenario]))
        return _played(scenario, media.at(address, model_revision=scenario, tenant=scenario), rank)


def squatters(address: str, tenant: str, num_pages: int) -> ExitStack:
    """Fills the tenant's memory, which has `FRAMES` pages then, with pages that nobody can be made to give up: clients
    hold them, each as many as one may."""
    stack = ExitStack()
    keys = np.random.default_rng(1).integers(0, 256, (num_pages, 32), dtype=np.uint8)
    pages = np.zeros((num_pages, PAGE_BYTES), np.uint8)
    for first in range(0, num_pages, FRAMES // 2):
        mine = slice(first, min(num_pages, first + FRAMES // 2))
        store: Store = stack.enter_context(
            connect_store(
                address, namespace="squatters", tenant=tenant, page_bytes=PAGE_BYTES, memory_bytes=FRAMES * PAGE_BYTES
            )
        )
        assert (store.put(keys[mine], pages[mine]) == Outcome.OK).all()
        hold = store.hold(keys[mine])
        assert (hold.outcomes == Outcome.OK).all()
        stack.callback(hold.release)
    return stack


def lose_on_the_way(rig: CacheRig) -> None:
    """Both ranks found the page before one of them loses it."""
    backend = rig.controller.storage_backend
    get = backend.batch_get_v1

    def lose_and_get(*arguments: Any) -> list[bool]:
        rig.lose_page(TOKENS, LOST_LATER)
        found: list[bool] = get(*arguments)
        return found

    backend.batch_get_v1 = lose_and_get


def play_states(storage: Storage, rank: int) -> dict[str, int]:
    """A model with recurrent layers: four pages are the least of what each rank has at most, and rank 1 has no state
    there."""
    model, tokens = Model(layers=2), TOKENS[:96]
    kv = kv_of(model, tokens, rank=rank)
    with StateRig(model, storage, rank=rank, ranks=RANKS, groups=[dist.group.WORLD]) as rig:
        for pages in (2, 4, 6):
            rig.compute(tokens[: pages * model.page_size], kv)
        lost = STATES_LOST[rank]
        rig.pool_loses("mamba", rig.page_hashes(tokens)[lost - 1 : lost])
        dist.barrier()
        rig.forget()
        fetched = rig.fetch(tokens)
        rig.load(tokens)
        wrong = int((rig.on_device(tokens) != kv[:fetched]).any(axis=(1, 2, 3)).sum())
        if fetched:
            states = zip(rig.state_on_device(tokens), rig.state_of(tokens[:fetched]), strict=True)
            wrong += sum(not bool((part == wanted).all()) for part, wanted in states)
        rig.check()
        dist.barrier()
    return {"fetched": fetched, "wrong_rows": wrong, "refused": 0}


def _played(scenario: str, storage: Storage, rank: int) -> dict[str, int]:
    if scenario == "different_states":
        return play_states(storage, rank)
    kv = kv_of(MODEL, TOKENS, rank=rank)
    with CacheRig(MODEL, storage, rank=rank, ranks=RANKS, groups=[dist.group.WORLD]) as rig:
        rig.compute(TOKENS, kv)
        if rank == 1:
            for page in LOST.get(scenario, ()):
                rig.lose_page(TOKENS, page)
            if scenario == "lost_after_the_query":
                lose_on_the_way(rig)
        dist.barrier()
        rig.forget()
        fetched = rig.fetch(TOKENS)
        loaded = rig.load(TOKENS)
        rows = rig.on_device(TOKENS)
        assert loaded == fetched == len(rows)
        rig.check()
        puts = rig.controller.storage_backend._core.gate.counts().get("put", {})
        dist.barrier()
    wrong = int((rows != kv[:loaded]).any(axis=(1, 2, 3)).sum()) if loaded else 0
    return {"fetched": fetched, "wrong_rows": wrong, "refused": puts.get("no_space", 0)}


if __name__ == "__main__":
    main(*sys.argv[1:4], int(sys.argv[4]), sys.argv[5:])
