"""What SGLang has in its own memory is in use in the node, too: a prompt that grows at its end keeps its beginning."""

from __future__ import annotations

import itertools

import pytest

from tests.engines.sglang import media
from tests.engines.sglang.processes import Daemon
from tests.engines.sglang.rig import CacheRig, Model, kv_of

PAGES_KEPT = 32
FRAME_BYTES = 8192
GROWING = list(range(1000, 1000 + 24 * 16))
OTHERS = itertools.count(1_000_000, 10_000)


@pytest.mark.parametrize("core", ["rust", "python"])
@pytest.mark.parametrize("is_v1", [1, 0])
def test_a_prompt_that_grew_in_the_engine_is_whole_after_a_restart(
    core: str, is_v1: int, shared_daemon: Daemon, request: pytest.FixtureRequest
) -> None:
    """Its beginning never leaves the engine, so that SGLang never asks for it; others push pages out of the node."""
    model = Model()
    storage = media.ours(
        shared_daemon.address,
        model_revision=request.node.nodeid,
        tenant=request.node.nodeid,
        memory_gib=PAGES_KEPT * FRAME_BYTES / 2**30,
        interface_v1=is_v1,
    )
    with CacheRig(model, storage, core=core, device_pages=400, host_pages=800) as rig:
        kv = kv_of(model, GROWING)
        for pages in range(2, 26, 2):
            known, prompt = GROWING[: 16 * pages], GROWING[: 16 * pages + 5]
            assert rig.fetch(prompt) == 0
            rig.compute(known, kv[: len(known)])
            other = list(range(next(OTHERS), next(OTHERS)))[: 4 * 16]
            rig.compute(other, kv_of(model, other))
    with CacheRig(model, storage, core=core) as successor:
        assert successor.fetch(GROWING) == len(GROWING)
        successor.load(GROWING)
        assert (successor.on_device(GROWING) == kv).all()
