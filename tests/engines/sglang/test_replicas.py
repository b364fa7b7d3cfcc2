"""Data-parallel ranks of one deployment: each has a scheduler and a cache of its own, and all have one another's pages.

With `--dp-size` each has all of the model; with `--enable-dp-attention` they are groups of attention ranks. What a
storage is told of them differs, so both are played.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from sglang.srt.managers import cache_controller
from sglang.srt.runtime_context import get_parallel

from engine_plugin.sglang.arguments import metric_labels
from tests.engines.sglang import media
from tests.engines.sglang.rig import CacheRig, Model, Storage, kv_of

TOKENS = list(range(1000, 1064))
REPLICAS = 2
Placement = Callable[[int], dict[str, int]]


@pytest.fixture(params=["whole", "attention"])
def placed(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Placement:
    """Where the only rank of a replica is."""
    is_attention = request.param == "attention"
    monkeypatch.setattr(cache_controller, "is_dp_attention_enabled", lambda: is_attention)

    def placement(replica: int) -> dict[str, int]:
        of_all = {"num_dp_ranks": REPLICAS, "dp_rank": replica}
        if not is_attention:
            return of_all
        of_group = {"tp_rank": replica, "attn_dp_rank": replica}
        return {**of_all, **of_group, "tp_size": REPLICAS, "attn_dp_size": REPLICAS, "moe_tp_size": REPLICAS}

    return placement


@pytest.mark.parametrize("kind", ["mha", "mla"])
def test_each_stores_for_all_at_one_daemon(placed: Placement, kind: str, storage: Storage) -> None:
    """Of replicated KV, too: one rank of each replica writes."""
    model = Model(kind=kind)
    for writer, reader, tokens in ((1, 0, TOKENS), (0, 1, TOKENS[::-1])):
        kv = kv_of(model, tokens)
        with CacheRig(model, storage, placement=placed(writer)) as rig:
            rig.compute(tokens, kv)
        with CacheRig(model, storage, placement=placed(reader)) as rig:
            assert rig.fetch(tokens) == len(tokens)
            rig.load(tokens)
            assert np.array_equal(rig.on_device(tokens), kv)


def test_nodes_of_their_own_share_out_the_memory_that_was_asked_for(placed: Placement) -> None:
    with CacheRig(Model(), media.ours("private"), placement=placed(1)) as rig:
        node = rig.controller.storage_backend._core._node
        assert node.memory_bytes() == int(media.MEMORY_GIB * 2**30) // REPLICAS


def test_metrics_tell_them_apart(placed: Placement) -> None:
    for replica in range(REPLICAS):
        with CacheRig(Model(), Storage(), placement=placed(replica)):
            assert get_parallel().dp_rank == replica
            assert metric_labels(tp_rank=0, pp_rank=0, attn_cp_rank=0)["dp_rank"] == str(replica)
    with CacheRig(Model(), Storage()):
        assert metric_labels(tp_rank=0, pp_rank=0, attn_cp_rank=0)["dp_rank"] == "0"
