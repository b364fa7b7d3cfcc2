"""A second pool beside the KV pool, by SGLang's interface v2: the real tree and controller of a sliding-window model.

A prefix is restored when every page of its full layers and the last window of its others are there, and not otherwise.
"""

from __future__ import annotations

import numpy as np
import pytest
from sglang.srt.mem_cache.hicache_storage import PoolName, PoolTransfer

from tests.engines.sglang.journeys import TOKENS, outlives_its_engine
from tests.engines.sglang.rig import CacheRig, Model, Storage, kv_of
from tests.engines.sglang.swa_rig import SwaRig

MODEL = Model(layers=4)
KV = kv_of(MODEL, TOKENS)
SWA = "swa"


def _check_device(rig: SwaRig, num_tokens: int) -> None:
    """The device has the first tokens: all rows of full layers, the last window of the others."""
    rows, expected = rig.on_device(TOKENS), KV[:num_tokens]
    assert len(rows) == num_tokens
    assert np.array_equal(rows[:, 1::2], expected[:, 1::2]), "full layers"
    in_window = slice(-SwaRig.window_tokens, None)
    assert np.array_equal(rows[in_window, ::2], expected[in_window, ::2]), "window layers"
    rig.check()


def _lose_window_pages(rig: SwaRig, pages: slice) -> None:
    """Storage loses pages of the window pool alone."""
    rig.pool_loses(SWA, rig.page_hashes(TOKENS)[pages])


@pytest.mark.parametrize("core", ["rust", "python"])
@pytest.mark.parametrize("layout", ["page_first", "page_first_direct"])
def test_every_byte_of_both_pools_comes_back(layout: str, core: str, storage: Storage) -> None:
    model = Model(layers=4, layout=layout)
    outlives_its_engine(lambda: SwaRig(model, storage, core=core), TOKENS, KV, _check_device)


def test_a_prefix_whose_window_is_lost_is_not_restored(storage: Storage) -> None:
    with SwaRig(MODEL, storage) as rig:
        rig.compute(TOKENS, KV)
        _lose_window_pages(rig, slice(None))
        rig.forget()
        assert rig.fetch(TOKENS) == 0
        assert rig.load(TOKENS) == 0
        rig.check()
        rig.compute(TOKENS, KV)
        rig.forget()
        assert rig.fetch(TOKENS) == 96, "computed and stored again"


def test_a_prefix_ends_where_its_window_is_whole(storage: Storage) -> None:
    with SwaRig(MODEL, storage) as rig:
        rig.compute(TOKENS, KV)
        _lose_window_pages(rig, slice(5, 6))
        rig.forget()
        assert rig.fetch(TOKENS) == 80
        assert rig.load(TOKENS) == 80
        _check_device(rig, 80)


def test_heads_of_their_own_beside_replicated_kv_are_refused(
    storage: Storage, caplog: pytest.LogCaptureFixture
) -> None:
    """SGLang lets the first rank of such a model store, and no other: nobody would store the heads of the others."""
    with CacheRig(Model(), Storage()) as draft, CacheRig(Model("mla"), storage, ranks=2) as rig:
        backend = rig.controller.storage_backend
        backend.register_mem_host_pool_v2(draft.host, "draft")
        assert "host pool 'draft' is not kept" in caplog.text
        assert "SGLang lets the first one alone store them" in caplog.text
        need = PoolTransfer(PoolName.DRAFT)
        rig.compute(TOKENS, kv_of(rig.model, TOKENS))
        hashes = rig.page_hashes(TOKENS)
        assert backend.batch_exists(hashes) == 6
        assert backend.batch_exists_v2(hashes, [need]).kv_hit_pages == 0, "nothing is restored in part"


def test_a_pool_of_an_unknown_kind_is_not_kept_and_the_attach_stands(
    storage: Storage, caplog: pytest.LogCaptureFixture
) -> None:
    """SGLang cannot take an attach back when a pool beside the anchor is registered."""
    with CacheRig(Model(), storage) as rig:
        rig.controller.storage_backend.register_mem_host_pool_v2(object(), "auxiliary_swa")
        assert "host pool 'auxiliary_swa' is not kept" in caplog.text
        rig.compute(TOKENS, kv_of(rig.model, TOKENS))
        rig.forget()
        assert rig.fetch(TOKENS) == 96
