"""Recurrent state beside the KV pool, by SGLang's interface v2: the real tree and controller of a hybrid model.

A prefix can be restored where the state at its end is, and nowhere else: a state at eight pages is none at seven.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.engines.sglang.journeys import TOKENS, outlives_its_engine
from tests.engines.sglang.rig import Model, Storage, kv_of
from tests.engines.sglang.state_rig import StateRig

MODEL = Model(layers=2)
KV = kv_of(MODEL, TOKENS)
STATE = "mamba"


def _check_device(rig: StateRig, num_tokens: int) -> None:
    """The device has the first tokens' KV and the state at their end, in the tree and in the request's own slot."""
    rows = rig.on_device(TOKENS)
    assert np.array_equal(rows, KV[:num_tokens])
    expected = rig.state_of(TOKENS[:num_tokens])
    for state in (rig.state_on_device(TOKENS), rig.request_state):
        assert all(torch.equal(part, wanted) for part, wanted in zip(state, expected, strict=True))
    rig.check()


@pytest.mark.parametrize("core", ["rust", "python"])
@pytest.mark.parametrize("layout", ["page_first", "page_first_direct"])
def test_every_byte_of_kv_and_state_comes_back(layout: str, core: str, storage: Storage) -> None:
    model = Model(layers=2, layout=layout)
    outlives_its_engine(lambda: StateRig(model, storage, core=core), TOKENS, KV, _check_device)


def test_a_prefix_ends_where_a_state_is(storage: Storage) -> None:
    """States at three pages and at six: without the later one the earlier one is gone on from."""
    with StateRig(MODEL, storage) as rig:
        rig.compute(TOKENS[:48], KV)
        rig.compute(TOKENS, KV)
        rig.pool_loses(STATE, rig.page_hashes(TOKENS)[5:])
        rig.forget()
        assert rig.fetch(TOKENS) == 48
        assert rig.load(TOKENS) == 48
        _check_device(rig, 48)


def test_kv_without_a_state_is_not_restored(storage: Storage) -> None:
    with StateRig(MODEL, storage) as rig:
        rig.compute(TOKENS, KV)
        rig.pool_loses(STATE, rig.page_hashes(TOKENS)[5:])
        rig.forget()
        assert rig.fetch(TOKENS) == 0
        rig.check()
        rig.compute(TOKENS, KV)
        rig.forget()
        assert rig.fetch(TOKENS) == 96, "computed and stored again"


def test_a_state_without_its_kv_is_not_restored(storage: Storage) -> None:
    with StateRig(MODEL, storage) as rig:
        rig.compute(TOKENS[:48], KV)
        rig.compute(TOKENS, KV)
        rig.lose_page(TOKENS, 4)
        rig.forget()
        assert rig.fetch(TOKENS) == 48, "four pages of KV, and the last state in them is at three"
        rig.load(TOKENS)
        _check_device(rig, 48)
