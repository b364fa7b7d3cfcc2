"""The calls of one `Store.get`, each begun before the one in front of it is copied.

DESIGN. A call holds what it found until it has been copied, so that a get of many pages works in slices. One after the
other, the storage would rest while the client copies, and at the end of every slice. So there is one call ahead: never
more than two hold anything, and none where two could hold more than the node lets this client.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from cachesvc.client.store_link import StoreLink
from cachesvc.rpc import managed_pb2
from storage_backends.base import Outcome

Keys = NDArray[np.uint8]
U32 = NDArray[np.uint32]


class Reads:
    """Of `keys` uint8 [n, 32] at `depths` uint32 [n], behind those of `prefix` [m, 32]. Slices are asked for in their
    order."""

    def __init__(self, keys: Keys, depths: U32, prefix: Keys) -> None:
        self._keys = keys
        self._depths = depths
        self._prefix = prefix
        self._goes_ahead = True
        self._ahead: tuple[StoreLink, int, managed_pb2.ToStore] | None = None  # and the page that it begins with

    def ask(self, link: StoreLink, part: slice, deadline_s: float) -> tuple[int, managed_pb2.FromStore]:
        """The number of the call that asks for `part`, and its answer. What `StoreLink.answer` raises."""
        asked = self._take_ahead(link, part)
        was_ahead = asked is not None
        if asked is None:
            asked = self._begin(link, part)
        following = slice(part.stop, min(len(self._keys), part.stop + link.max_pages))
        if self._goes_ahead and following.start < following.stop and 2 * link.max_pages <= link.max_held_pages:
            self._ahead = link, following.start, self._begin(link, following)
        answer = link.answer(asked, deadline_s)
        if was_ahead and _is_throttled(answer):
            # Other holds of this client leave no room for two. The one in front has been given back by now.
            self._goes_ahead = False
            self.give_up(link)
            asked = self._begin(link, part)
            answer = link.answer(asked, deadline_s)
        return asked.call, answer

    def give_up(self, link: StoreLink) -> None:
        """No further slice is wanted. LinkBroken."""
        if self._ahead is not None and self._ahead[0] is link:
            _, _, asked = self._ahead
            link.forget(asked)
            link.tell(managed_pb2.ToStore(release=managed_pb2.Release(found=asked.call)))
        self._ahead = None

    def _take_ahead(self, link: StoreLink, part: slice) -> managed_pb2.ToStore | None:
        """The call that was begun for `part`. None: there is none on this connection."""
        ahead, self._ahead = self._ahead, None
        return ahead[2] if ahead is not None and ahead[0] is link and ahead[1] == part.start else None

    def _begin(self, link: StoreLink, part: slice) -> managed_pb2.ToStore:
        prefix = in_front(self._prefix, self._keys[: part.start], link.max_keys)
        get = managed_pb2.Get(keys=self._keys[part].tobytes(), depths=self._depths[part].tobytes(), prefix=prefix)
        asked = managed_pb2.ToStore(get=get)
        link.begin(asked)
        return asked


def in_front(prefix: Keys, keys: Keys, max_keys: int) -> bytes:
    """The keys in front of a slice, packed: `prefix` [m, 32], then the `keys` [n, 32] of the slices before it. Of more
    than the node takes, the first ones: without those a prompt's others are worth nothing."""
    return prefix[:max_keys].tobytes() + keys[: max(0, max_keys - len(prefix))].tobytes()


def _is_throttled(answer: managed_pb2.FromStore) -> bool:
    return bool(answer.found.outcomes) and set(answer.found.outcomes) == {Outcome.THROTTLED}
