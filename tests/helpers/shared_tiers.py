"""Nodes on a tier that others use too."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import numpy as np

from cachesvc.node.node import Node
from cachesvc.node.tiers import Tier
from storage_backends.bounds import in_bounds
from storage_backends.registry import open_backend
from tests.oracles.pages import Engine, chain

KEYS, FRAMES = chain(1, 40), np.arange(40, dtype=np.int32)


@contextmanager
def node_on(tier: tuple[str, Mapping[str, object]]) -> Iterator[Node]:
    backend = in_bounds(open_backend(*tier), None)
    assert backend.wait_ready(30)
    with Node([Tier(tier[0], backend)]) as node:
        yield node


def found(engine: Engine) -> int:
    """Pages of KEYS that the engine's node can get."""
    answer = engine.client.lookup(KEYS)
    if answer.pending_op is None:
        return int(answer.num_pages)
    assert engine.wait(answer.pending_op) == "completed"
    return int(engine.hits[answer.pending_op])
