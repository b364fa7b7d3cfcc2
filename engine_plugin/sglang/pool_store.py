"""The pages of one host pool in the node: SGLang's hashes to keys, a pool's slots to memory, one verb a call.

Each verb has a connection of its own, so that a hit query never waits for a batch that is being copied. A page that is
cut for ranks of another number (`Shard`) is several objects; it is there when all of them are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import reduce

import numpy as np
from cachekernels.pages import hashes_from_hex
from numpy.typing import NDArray

from cachesvc.client.base import MAX_USED_PAGES
from cachesvc.client.store import Store
from cachesvc.client.store_hold import PageHold
from engine_plugin.sglang.gate import Deadline, Gate, StoreVerb
from engine_plugin.sglang.host_pages import HostPages
from storage_backends.base import Outcome, Outcomes, outcomes

I64 = NDArray[np.int64]
U64 = NDArray[np.uint64]
Keys = NDArray[np.uint8]
Bools = NDArray[np.bool_]

NEARLY_OVER_S = 1e-3
WORST_GOOD = np.uint8(Outcome.EXISTS)  # of an array's own kind: comparing it with an enumeration costs 25 µs in a query


@dataclass(frozen=True)
class Stores:
    """The connections of one shard, all to the same pages."""

    exists: Store
    get: Store
    put: Store

    def close(self, deadline: Deadline) -> None:
        """Leaves the node three times. Idempotent."""
        for store in (self.exists, self.get, self.put):
            store.close(deadline.left_s)


@dataclass(frozen=True)
class Shard:
    """Pages of one shape in the host pool, and where they are kept."""

    pages: HostPages
    stores: Stores


@dataclass(frozen=True)
class Place:
    """Where pages stand in their prompt: `first_page` is the position of the first one. `prefix`: hashes of those in
    front of it which are used with them, from the prompt's first page on."""

    first_page: int = 0
    prefix: Sequence[str] = ()

    def prefix_keys(self) -> Keys:
        """uint8 [m, 32]."""
        return hashes_from_hex(self.prefix[:MAX_USED_PAGES])


NOWHERE = Place()


class PoolStore:
    """One pool of this rank. `shards`: at least one. Calls of one verb come from one thread at a time.

    hashes: SGLang's page hashes, n strings of 64 hexadecimal digits. slots: int64 [n * page_size] of the pool. What
    does not fit is a ValueError. Answers are bool [n].
    """

    def __init__(self, shards: Sequence[Shard], gate: Gate) -> None:
        self._shards = shards
        self._gate = gate
        self.page_size = shards[0].pages.page_size
        self.page_bytes = sum(shard.pages.page_bytes for shard in shards)

    @property
    def is_connected(self) -> bool:
        """Whether the node was there at the last query."""
        return all(shard.stores.exists.is_connected for shard in self._shards)

    def exists(self, hashes: Sequence[str], deadline: Deadline, place: Place = NOWHERE) -> Bools:
        """Whether the page can be had now."""
        keys, prefix = hashes_from_hex(hashes), place.prefix_keys()

        def ask(shard: Shard, timeout_s: float) -> Outcomes:
            return shard.stores.exists.contains(keys, prefix=prefix, timeout_s=timeout_s)

        return self._each(StoreVerb.EXISTS, len(keys), deadline, ask)

    def hold(self, hashes: Sequence[str], deadline: Deadline) -> PageHold | None:
        """Keeps the first pages, as far as the node's memory has them, until they are released. None: the node was not
        asked. Of a pool whose pages are whole: one shard."""
        keys = hashes_from_hex(hashes)
        (shard,) = self._shards
        holds: list[PageHold] = []

        def ask() -> Outcomes:
            holds.append(shard.stores.exists.hold(keys, timeout_s=max(deadline.left_s, NEARLY_OVER_S)))
            return holds[0].outcomes

        self._gate.call(StoreVerb.EXISTS, len(keys), ask)
        return holds[0] if holds else None

    def get(self, hashes: Sequence[str], slots: I64, place: Place, deadline: Deadline) -> Bools:
        """Copies pages into the pool. Slots of a page that did not come hold anything."""
        keys, prefix = hashes_from_hex(hashes), place.prefix_keys()
        self._check(len(keys), slots)

        def ask(shard: Shard, timeout_s: float) -> Outcomes:
            view = shard.pages.targets(slots)
            results = shard.stores.get.get(
                keys,
                view.addresses,
                segment_bytes=shard.pages.segment_bytes,
                first_page=place.first_page,
                prefix=prefix,
                timeout_s=timeout_s,
            )
            shard.pages.arrived(view, results == Outcome.OK)
            return results

        return self._each(StoreVerb.GET, len(keys), deadline, ask)

    def put(self, hashes: Sequence[str], slots: I64, place: Place, deadline: Deadline) -> Bools:
        """Copies pages out of the pool. True: the node has the page."""
        keys, prefix = hashes_from_hex(hashes), place.prefix_keys()
        self._check(len(keys), slots)

        def ask(shard: Shard, timeout_s: float) -> Outcomes:
            view = shard.pages.sources(slots)
            return shard.stores.put.put(
                keys,
                view.addresses,
                segment_bytes=shard.pages.segment_bytes,
                first_page=place.first_page,
                prefix=prefix,
                timeout_s=timeout_s,
            )

        return self._each(StoreVerb.PUT, len(keys), deadline, ask)

    def get_copies(self, hashes: Sequence[str], addresses: U64, deadline: Deadline) -> Bools:
        """Copies pages to memory outside of the pool: `page_bytes` at each of addresses uint64 [n]."""
        keys = hashes_from_hex(hashes)

        def ask(shard: Shard, timeout_s: float) -> Outcomes:
            return shard.stores.get.get(keys, addresses, timeout_s=timeout_s)

        return self._each(StoreVerb.GET, len(keys), deadline, ask)

    def put_copies(self, hashes: Sequence[str], addresses: U64, deadline: Deadline) -> Bools:
        """Copies pages from memory outside of the pool."""
        keys = hashes_from_hex(hashes)

        def ask(shard: Shard, timeout_s: float) -> Outcomes:
            return shard.stores.put.put(keys, addresses, timeout_s=timeout_s)

        return self._each(StoreVerb.PUT, len(keys), deadline, ask)

    def delete(self, hashes: Sequence[str], deadline: Deadline) -> Bools:
        """Takes pages out of the node's memory and tiers. True: it was there."""
        keys = hashes_from_hex(hashes)

        def ask(shard: Shard, timeout_s: float) -> Outcomes:
            return shard.stores.put.delete(keys, timeout_s=timeout_s)

        return self._each(StoreVerb.DELETE, len(keys), deadline, ask)

    def clear(self, deadline: Deadline) -> bool:
        """Takes all pages of this pool, of this rank where ranks have pages of their own, out of the node's memory and
        tiers. False: some may still be there."""

        def ask(shard: Shard, timeout_s: float) -> Outcomes:
            return outcomes(1, shard.stores.put.clear(timeout_s=timeout_s))

        return bool(self._each(StoreVerb.CLEAR, 1, deadline, ask)[0])

    def close(self, deadline: Deadline) -> None:
        """Leaves the node, which has until `deadline` to answer; what was put stays there."""
        for shard in self._shards:
            shard.stores.close(deadline)

    def _check(self, count: int, slots: I64) -> None:
        if slots.shape != (count * self.page_size,):
            raise ValueError(f"{count} pages of {self.page_size} slots; got slots {list(slots.shape)}")

    def _each(self, verb: StoreVerb, count: int, deadline: Deadline, ask: Callable[[Shard, float], Outcomes]) -> Bools:
        """Whether every shard of the page is as asked for: EXISTS is, for a page that was put."""

        def ask_all() -> Outcomes:
            answers = []
            for shard in self._shards:
                left_s = deadline.left_s
                answers.append(ask(shard, left_s) if left_s else outcomes(count, Outcome.TIMEOUT))
            return reduce(np.maximum, answers)

        good: Bools = self._gate.call(verb, count, ask_all) <= WORST_GOOD
        return good
