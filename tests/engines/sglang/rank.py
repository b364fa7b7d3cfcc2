"""One rank of an engine, as a process of its own.

    python -m tests.engines.sglang.rank ADDRESS MEETING RANK SCENARIO...

In each scenario it computes, stores, forgets and fetches the same tokens as the other rank, with KV of its own. Prints,
by scenario, {"fetched": tokens, "wrong_rows": rows of the device that are not this rank's}.
"""

from __future__ import annotations

import json
import sys
from datetime import timedelta

import torch.distributed as dist

from tests.engines.sglang.plugin import sglang_on_cpu

sglang_on_cpu.install()

from tests.engines.sglang import media  # noqa: E402
from tests.engines.sglang.rig import HANG_S, CacheRig, Model, kv_of  # noqa: E402

RANKS = 2
MODEL = Model(layers=4, dim=64)
TOKENS = list(range(1000, 1128))
LOST = {"page_missing": (5,), "unequal_space": (6, 7)}
"""Pages that rank 1 lost, by scenario."""


def main(address: str, meeting: str, rank: int, scenarios: list[str]) -> None:
    patience = timedelta(seconds=4 * HANG_S)
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=RANKS, timeout=patience)
    print(json.dumps({scenario: play(scenario, address, rank) for scenario in scenarios}), flush=True)
    dist.destroy_process_group()


def play(scenario: str, address: str, rank: int) -> dict[str, int]:
    """One scenario; rank 1 is the odd one."""
    is_odd_one = rank == 1
    if scenario == "one_without_storage" and is_odd_one:
        address = f"{address}.nobody"
    kv = kv_of(MODEL, TOKENS, rank=rank)
    storage = media.at(address, model_revision=scenario)
    with CacheRig(MODEL, storage, rank=rank, ranks=RANKS, groups=[dist.group.WORLD]) as rig:
        rig.compute(TOKENS, kv)
        if is_odd_one:
            for page in LOST.get(scenario, ()):
                rig.lose_page(TOKENS, page)
        dist.barrier()
        rig.forget()
        fetched = rig.fetch(TOKENS)
        loaded = rig.load(TOKENS)
        rows = rig.on_device(TOKENS)
        assert loaded == fetched == len(rows)
        rig.check()
        dist.barrier()
    return {"fetched": fetched, "wrong_rows": int((rows != kv[:loaded]).any(axis=(1, 2, 3)).sum()) if loaded else 0}


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4:])
