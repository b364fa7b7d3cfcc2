"""Controls: what the other tests compare would differ if a page were wrong. Each storage here is wrong on purpose."""

from __future__ import annotations

import numpy as np
import pytest

from tests.engines.sglang import media
from tests.engines.sglang.processes import Daemon
from tests.engines.sglang.rig import CacheRig, Model, kv_of

TOKENS = list(range(1000, 1096))


@pytest.mark.parametrize("layout", ["page_first", "page_first_direct", "page_head", "layer_first"])
@pytest.mark.parametrize("wrong", ["Scaled", "TwoSwapped", "OneZeroed", "OneByte", "Late"])
def test_a_wrong_page_is_seen(wrong: str, layout: str, shared_daemon: Daemon, request: pytest.FixtureRequest) -> None:
    model = Model(layout=layout)
    kv = kv_of(model, TOKENS)
    right = media.ours(shared_daemon.address, model_revision=request.node.nodeid)
    with CacheRig(model, right) as rig:
        rig.compute(TOKENS, kv)
    tampered = media.ours(
        shared_daemon.address,
        model_revision=request.node.nodeid,
        module_path="tests.engines.sglang.plugin.tampered_storage",
        class_name=wrong,
    )
    with CacheRig(model, tampered) as rig:
        assert rig.fetch(TOKENS) == 96
        rig.load(TOKENS)
        assert not np.array_equal(rig.on_device(TOKENS), kv)
    with CacheRig(model, right) as rig:
        rig.fetch(TOKENS)
        rig.load(TOKENS)
        assert np.array_equal(rig.on_device(TOKENS), kv), "what is stored was right all the time"
