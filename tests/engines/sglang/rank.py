"""One rank of an engine, as a process of its own.

    python -m tests.engines.sglang.rank SCENARIO ADDRESS MEETING REVISION RANK

Computes, stores, forgets and fetches the same tokens as the other rank, with KV of its own. Prints {"fetched": tokens,
"wrong_rows": rows of the device that are not this rank's}.
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


def main(scenario: str, address: str, meeting: str, revision: str, rank: int) -> None:
    dist.init_process_group(
        "gloo", init_method=f"file://{meeting}", rank=rank, world_size=RANKS, timeout=timedelta(seconds=HANG_S)
    )
    extra: dict[str, object] = {"model_revision": revision}
    is_odd_one = rank == 1
    if scenario == "one_without_storage" and is_odd_one:
        address = f"{address}.nobody"
    kv = kv_of(MODEL, TOKENS, rank=rank)
    storage = media.at(address, **extra)
    with CacheRig(MODEL, storage, rank=rank, ranks=RANKS, groups=[dist.group.WORLD]) as rig:
        rig.compute(TOKENS, kv)
        if is_odd_one and scenario == "page_missing":
            rig.lose_page(TOKENS, 5)
        if is_odd_one and scenario == "unequal_space":
            rig.lose_page(TOKENS, 7)
            rig.lose_page(TOKENS, 6)
        dist.barrier()
        rig.forget()
        fetched = rig.fetch(TOKENS)
        loaded = rig.load(TOKENS)
        rows = rig.on_device(TOKENS)
        wrong = int((rows != kv[:loaded]).any(axis=(1, 2, 3)).sum()) if loaded else 0
        assert loaded == fetched, (loaded, fetched)
        assert len(rows) == loaded
        rig.check()
        dist.barrier()
    print(json.dumps({"fetched": fetched, "wrong_rows": wrong}), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:5], int(sys.argv[5]))
