"""File descriptors: how many may still be opened, and what each thing that a node keeps takes of them.

DESIGN. The limit is the process's (ulimit -n). What is in use is counted and not kept account of, so that what tiers,
doors and libraries have open is in it. Some stay in reserve: transfers of tiers open files for moments, an attach holds
more than the session that comes of it, and a client that is refused needs a connection to be told by. A session is let
in only where it leaves the reserve alone; what nobody uses makes room for it first.

The kernel gives out the lowest free number. So a new descriptor's number alone tells when few are left, at no cost.
"""

from __future__ import annotations

import os
import resource
from collections.abc import Callable
from dataclasses import dataclass

SESSION = 7
"""An attached engine: the socket, its process twice, the eventfd twice, the two files of its region. A store's client
takes fewer, and shares its slab's two with others."""
LOST = 4
"""An engine whose connection broke: its process, the eventfd, the region."""
KEPT = 2
"""A kept region, or a slab."""
OPENING = 6
"""What an attach holds for moments beyond its session: the hello's two, the mapped offer's, the Welcome's."""
RESERVE = 48


def open_descriptors() -> int:
    """How many this process has open. OSError: /proc is not there."""
    return len(os.listdir("/proc/self/fd")) - 1  # the folder's own


def descriptor_limit() -> int:
    """How many it may have."""
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


@dataclass(frozen=True)
class Descriptors:
    """The process's. `count_open` and `limit` are asked each time: others open and close too, and limits are raised."""

    count_open: Callable[[], int] = open_descriptors
    limit: Callable[[], int] = descriptor_limit
    reserve: int = RESERVE

    def shortage(self, need: int) -> str:
        """Why `need` more cannot be had, with need, have and reserve; empty where they can."""
        limit = self.limit()
        have = limit - self.count_open()
        if limit == resource.RLIM_INFINITY or need <= have - self.reserve:
            return ""
        return (
            f"file descriptors: need {need}, have {max(0, have)} of {limit} (ulimit -n), of which {self.reserve} are "
            "kept in reserve; raise the limit, or attach fewer engines"
        )

    def room_for(self, wanted: int, each: int, beside: int) -> int:
        """How many of `wanted` things that take `each` have room, beside so many others that are still to come."""
        limit = self.limit()
        if limit == resource.RLIM_INFINITY:
            return wanted
        return min(wanted, max(0, limit - self.count_open() - beside - self.reserve) // each)

    def are_few(self, newest: int) -> bool:
        """Whether the number of a descriptor that was just opened shows that half of the reserve is gone."""
        limit = self.limit()
        return limit != resource.RLIM_INFINITY and newest >= limit - self.reserve // 2
