"""Nodes with memory of their own, without threads."""

import pytest

from cachesvc.node.node import Node
from cachesvc.node.parts import NodeOptions
from cachesvc.node.tiers import Tier
from tests.helpers.store_user import (
    PAGE_BYTES,
    check_conserved,
)
from tests.oracles.pages import run_all


@pytest.fixture
def node(backend, clock):
    options = NodeOptions(managed_bytes=64 * PAGE_BYTES, slice_pages=2)
    with Node([Tier("memory", backend)], manual=True, clock=clock, options=options) as node:
        yield node
        run_all(node)
        check_conserved(node)
        assert node.counters.worker_exceptions.value() == 0


@pytest.fixture
def bare():
    """A node without tiers."""
    with Node([], manual=True, options=NodeOptions(managed_bytes=64 * PAGE_BYTES)) as node:
        yield node
        check_conserved(node)
