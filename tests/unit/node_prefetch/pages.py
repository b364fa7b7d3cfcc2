"""A prompt's pages, the frames that they go to, and an engine that comes while they are read."""

import numpy as np

from tests.oracles.pages import (
    chain,
)

KEYS = chain(1, 12)
FRAMES = np.arange(12, dtype=np.int32)


def frames_in(engine, state):
    return engine.client.counters()[f'cachesvc_frames{{state="{state}"}}']


def joins_in_mid_read(node, backend, joiner, num_pages, then=lambda: None):
    """While the first read of storage runs, `joiner` asks for the first pages of `KEYS` too, which waits for that read;
    `then` is called after. Returns the list that its op will be in."""
    ops = []

    def other_comes(_):
        if not ops:
            ops.append(joiner.prefetch(KEYS[:num_pages], FRAMES[:num_pages]))
            node.run_one()
            then()

    backend.before["get"] = other_comes
    return ops
