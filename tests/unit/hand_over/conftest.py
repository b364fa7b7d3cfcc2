"""A node that keeps regions, without threads."""

import pytest

from cachesvc.node.node import Node
from cachesvc.node.parts import NodeOptions
from cachesvc.node.tiers import Tier
from tests.unit.hand_over.engines import KEEP_S


@pytest.fixture
def node(clock, backend):
    options = NodeOptions(keep_regions_s=KEEP_S, slice_pages=2)
    with Node([Tier("memory", backend)], manual=True, clock=clock, options=options) as node:
        yield node
