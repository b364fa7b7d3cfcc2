"""Two engines on one node: what one has on host the other has too, and nobody else does."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cachesvc.identity import Identity
from cachesvc.node.node import Node
from cachesvc.node.tiers import Tier
from storage_backends.memory.backend import open_backend
from tests.helpers.caches import IDENTITY, PAGE, Rig, prompt

TOKENS = prompt(1, 12 * PAGE + 1)


def test_the_second_engine_hits_what_the_first_computed_and_the_other_way_round() -> None:
    with Node([], manual=True) as node, Rig(node=node, group="a") as first, Rig(node=node, group="b") as second:
        for one, other, seed in ((first, second, 1), (second, first, 2), (first, second, 3)):
            tokens = prompt(seed, 12 * PAGE + 1)
            assert one.run(tokens).total == 0
            one.settle()
            cached = other.run(tokens)  # every byte is compared
            assert (cached.host, cached.storage) == (0, 12 * PAGE)
            other.settle()
            one.cache.check()
            other.cache.check()


def test_replicas_of_one_group_share_as_well() -> None:
    with Node([], manual=True) as node, Rig(node=node) as first, Rig(node=node) as second:
        first.run(TOKENS)
        first.settle()
        assert second.run(TOKENS).storage == 12 * PAGE
        second.settle()


@pytest.mark.parametrize(
    "identity",
    [
        replace(IDENTITY, weights_digest="r2"),
        replace(IDENTITY, dtype="float16"),
        replace(IDENTITY, page_size=2 * PAGE),
        replace(IDENTITY, num_layers=2 * IDENTITY.num_layers),
        replace(IDENTITY, engine_layout="other"),
    ],
    ids=["weights", "dtype", "page size", "layers", "layout"],
)
def test_engines_that_differ_live_side_by_side_and_share_nothing(identity: Identity) -> None:
    node = Node([Tier("storage", open_backend({}))], manual=True)
    with node, Rig(node=node, group="a") as first, Rig(node=node, group="b", identity=identity) as second:
        for rig in (first, second, first, second):
            assert rig.run(TOKENS).storage == 0
            rig.settle()
            rig.forget_device()
        for rig in (first, second):
            pages = len(TOKENS[:-1]) // rig.identity.page_size
            assert rig.run(TOKENS).host == pages * rig.identity.page_size
            rig.settle()
            rig.cache.check()
