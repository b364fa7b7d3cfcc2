"""A node without threads, pages that are in storage alone, and an engine that wants them."""

import pytest

from cachesvc.node.node import Node
from cachesvc.node.parts import NodeOptions
from cachesvc.node.tiers import Tier
from tests.oracles.pages import (
    Engine,
    run_all,
)
from tests.unit.node_prefetch.pages import FRAMES, KEYS


@pytest.fixture
def node(backend):
    with Node([Tier("memory", backend)], manual=True, options=NodeOptions(slice_pages=4)) as node:
        yield node


@pytest.fixture
def stored(node, backend):
    """KEYS are in storage and nowhere else."""
    engine = Engine(node, "storer")
    engine.fill(KEYS, FRAMES, publish=False)
    engine.backup(KEYS, FRAMES)
    run_all(node)
    engine.client.detach()
    backend.reads.clear()
    backend.calls.clear()


@pytest.fixture
def engine(node):
    return Engine(node, "reader", 200)
