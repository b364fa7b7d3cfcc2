"""A node with memory of its own over one tier, which is conserved at the end."""

import pytest

from cachesvc.node.node import Node
from cachesvc.node.parts import NodeOptions
from cachesvc.node.tiers import Tier
from tests.helpers.store_user import PAGE_BYTES, check_conserved


@pytest.fixture
def node(backend):
    with Node([Tier("memory", backend)], options=NodeOptions(managed_bytes=64 * PAGE_BYTES)) as node:
        yield node
        check_conserved(node)
