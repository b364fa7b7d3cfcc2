"""Index keys of sparse attention beside the KV pool: a page is restored with both or not at all."""

from __future__ import annotations

import numpy as np
import pytest

from tests.engines.sglang.indexer_rig import PAGE_TOKENS, IndexerRig
from tests.engines.sglang.journeys import outlives_its_engine
from tests.engines.sglang.rig import Model, Storage, kv_of

MODEL = Model("mla", page_size=PAGE_TOKENS, layers=2)
TOKENS = list(range(1000, 1000 + 4 * PAGE_TOKENS + 5))
KV = kv_of(MODEL, TOKENS)
INDEXER = "indexer"


def _rig(storage: Storage, core: str = "rust", layout: str = "page_first") -> IndexerRig:
    model = Model("mla", layout, page_size=PAGE_TOKENS, layers=2)
    return IndexerRig(model, storage, core=core, device_pages=16, host_pages=32)


def _check_device(rig: IndexerRig, num_tokens: int) -> None:
    expected = KV[:num_tokens]
    assert np.array_equal(rig.on_device(TOKENS), expected)
    assert np.array_equal(rig.index_on_device(TOKENS), rig.index_of(expected))
    rig.check()


@pytest.mark.parametrize("core", ["rust", "python"])
@pytest.mark.parametrize("layout", ["page_first", "page_first_direct", "layer_first"])
def test_every_byte_of_kv_and_index_comes_back(layout: str, core: str, storage: Storage) -> None:
    outlives_its_engine(lambda: _rig(storage, core, layout), TOKENS, KV, _check_device)


@pytest.mark.parametrize("lost", ["kv", INDEXER])
def test_a_prefix_ends_before_a_page_that_lacks_one_of_the_two(lost: str, storage: Storage) -> None:
    with _rig(storage) as rig:
        rig.compute(TOKENS, KV)
        rig.pool_loses(lost, rig.page_hashes(TOKENS)[2:3])
        rig.forget()
        assert rig.fetch(TOKENS) == 2 * PAGE_TOKENS
        rig.load(TOKENS)
        _check_device(rig, 2 * PAGE_TOKENS)
