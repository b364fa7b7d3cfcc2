"""The node in process: lookups as an engine makes them, through its client."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from cachekernels.region import Region
from numpy.typing import NDArray

from bench.harness import Measurement, Run, figure
from cachesvc.client.base import AttachRequest
from cachesvc.client.inprocess import InProcessClient
from cachesvc.identity import Identity
from cachesvc.node.node import Node
from cachesvc.node.tiers import Tier
from storage_backends.registry import open_backend

NUM_KEYS = 1600
NUM_OTHERS = 100_000
IDENTITY = Identity(
    model_id="bench",
    weights_digest="",
    config_digest="",
    dtype="bfloat16",
    page_size=16,
    num_layers=1,
    num_kv_heads=1,
    head_dim=8,
)
Keys = NDArray[np.uint8]


def some_keys(count: int) -> Keys:
    """Random keys: in an index all keys look like that."""
    return np.random.default_rng(count).integers(0, 256, (count, 32), dtype=np.uint8)


def attach(node: Node, group: str, num_frames: int) -> tuple[InProcessClient, Region]:
    client = InProcessClient(node)
    granted = client.attach(AttachRequest(IDENTITY, group, num_frames, IDENTITY.page_bytes()))
    return client, granted.region


def fill(region: Region, keys: Keys) -> NDArray[np.int32]:
    """Records for `keys` in frames [0, n); the bytes do not matter here."""
    frames = np.arange(len(keys), dtype=np.int32)
    region.begin_write(frames)
    region.write_records(frames, keys, frames.astype(np.uint32))
    region.commit(frames)
    return frames


def dictionary(keys: Keys) -> Callable[[], int]:
    """The leading hits of the same keys in a Python dict."""
    places = {key.tobytes(): number for number, key in enumerate(some_keys(NUM_OTHERS))}
    places.update((key.tobytes(), number) for number, key in enumerate(keys))

    def count() -> int:
        hits = 0
        for key in keys:
            if key.tobytes() not in places:
                break
            hits += 1
        return hits

    return count


def check(found: int) -> None:
    if found != NUM_KEYS:
        raise AssertionError(f"{found} of {NUM_KEYS} pages found")


@figure("lookup.1600", unit="us", target="value<=200", reference="a loop over a dict")
def lookup_in_frames(run: Run) -> Measurement:
    """All pages in another session's frames, among 100,000 others."""
    with Node() as node:
        owner, region = attach(node, "owner", NUM_KEYS + NUM_OTHERS)
        keys = some_keys(NUM_KEYS)
        owner.publish(fill(region, np.concatenate([keys, some_keys(NUM_OTHERS)])))
        client, _ = attach(node, "asker", 1)
        check(client.lookup(keys).num_pages)
        return run.paired(lambda: client.lookup(keys), dictionary(keys), scale=1e6, rounds=max(run.rounds, 51))


@figure("lookup.1600_storage", unit="us", reference="a loop over a dict")
def lookup_in_storage(run: Run) -> Measurement:
    """All pages in a storage tier that knows from memory what it holds."""
    with Node([Tier("memory", open_backend("memory", {}))]) as node:
        owner, region = attach(node, "owner", 2 * NUM_KEYS)
        keys = some_keys(NUM_KEYS)
        frames = fill(region, keys)
        owner.backup(keys, frames, frames.astype(np.uint32))
        if owner.drain(60.0):
            raise AssertionError("the pages were not stored")
        client, _ = attach(node, "asker", 1)
        check(client.lookup(keys).num_pages)
        return run.paired(lambda: client.lookup(keys), dictionary(keys), scale=1e6, rounds=max(run.rounds, 51))
