"""How a store reaches its node: one link at a time, made again after it was lost.

DESIGN. A lost link is dropped with all that its session held; the next one names that session, so that the node frees
what it still lends. Who looks for the node again is the store's mode: a program that waits for its answers anyway does
it in its own call, within that call's time; an engine, whose calls must cost nothing while the node is away, has a
thread look. Attempts are `FIRST_RETRY_S` apart at first, then twice as long each, up to `MAX_RETRY_S`.

NOTE: `ready` and `drop` are called with the store's lock held, `close` without it.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from abc import ABC, abstractmethod
from dataclasses import replace

from cachesvc.client.base import AttachRefused, NodeAway
from cachesvc.client.greeting import Dial
from cachesvc.client.store_link import LEAVE_TIMEOUT_S, StoreLink, open_link
from cachesvc.node.store_sessions import StoreRequest
from cachesvc.outcomes import AttachResult

logger = logging.getLogger(__name__)

FIRST_RETRY_S, MAX_RETRY_S = 0.1, 5.0
OPENING_S = 30.0
"""How long the thread of `ReconnectBehind` lets one attempt take: the node may have to clear the slab's memory."""


class StoreConnection(ABC):
    """The link to the node that `dial` connects to. `where` names it to people."""

    def __init__(self, dial: Dial, request: StoreRequest, where: str) -> None:
        self.request = request
        self._dial = dial
        self._where = where
        self._pid = os.getpid()
        self._link: StoreLink | None = None
        self._previous: tuple[int | None, bytes] = (None, b"")
        self._retry_s = FIRST_RETRY_S
        self._is_closed = False

    @property
    def is_connected(self) -> bool:
        """Whether there is a link, as far as is known."""
        return self._link is not None

    @property
    def memory_bytes(self) -> int:
        """Of the slab behind the link, which may be another client's and of another size than asked for. 0: no link."""
        link = self._link
        return 0 if link is None else link.region.num_frames * link.region.stride_bytes

    def open(self, timeout_s: float) -> None:
        """The first attempt. A node that is away is no error; AttachRefused."""
        try:
            self._link = self._attempt(timeout_s)
        except NodeAway as error:
            self._away(str(error))

    def look_again(self, why: str) -> None:
        """The attempt failed for a reason that passes."""
        self._away(why)

    @abstractmethod
    def ready(self, deadline_s: float) -> StoreLink | None:
        """The link for one call. None: the node is away."""

    def drop(self, why: str) -> None:
        """The link is of no use any more."""
        if self._link is not None:
            self._previous = self._link.session_id, self._link.boot_id
            self._link.close()
            self._link = None
        self._away(why)

    def close(self, timeout_s: float = LEAVE_TIMEOUT_S) -> None:
        """Leaves the node, which has `timeout_s` to answer. Idempotent."""
        self._is_closed = True
        link, self._link = self._link, None
        if link is None:
            return
        if self._pid == os.getpid():
            link.leave(timeout_s)
        else:
            link.close()

    def _attempt(self, timeout_s: float) -> StoreLink:
        previous, boot_id = self._previous
        return open_link(self._dial, replace(self.request, previous=previous), boot_id, max(0.0, timeout_s))

    def _away(self, why: str) -> None:
        if self._retry_s == FIRST_RETRY_S:  # once per spell
            logger.warning("store: the node at %s is away: %s", self._where, why)

    def _back(self) -> None:
        logger.info("store: the node at %s is back", self._where)
        self._retry_s = FIRST_RETRY_S


class ReconnectInCall(StoreConnection):
    """A call that finds no link makes one, unless that failed a moment ago."""

    _retry_at_s = 0.0

    def ready(self, deadline_s: float) -> StoreLink | None:
        now_s = time.monotonic()
        if self._link is None and not self._is_closed and now_s >= self._retry_at_s:
            try:
                self._link = self._attempt(deadline_s - now_s)
            except (NodeAway, AttachRefused) as error:
                self._away(str(error))
            else:
                self._back()
        return self._link

    def _away(self, why: str) -> None:
        super()._away(why)
        self._retry_at_s = time.monotonic() + self._retry_s
        self._retry_s = min(MAX_RETRY_S, 2 * self._retry_s)


class ReconnectBehind(StoreConnection):
    """A thread makes the link; calls in between have none, at once."""

    def __init__(self, dial: Dial, request: StoreRequest, where: str) -> None:
        super().__init__(dial, request, where)
        self._state = threading.Lock()  # of the link, `_is_closed` and `_is_looking`
        self._closing = threading.Event()
        self._is_looking = False

    def ready(self, deadline_s: float) -> StoreLink | None:
        return self._link

    def close(self, timeout_s: float = LEAVE_TIMEOUT_S) -> None:
        self._closing.set()
        with self._state:  # a link that comes later is left by the thread
            self._is_closed = True
        super().close(timeout_s)

    def _away(self, why: str) -> None:
        super()._away(why)
        with self._state:
            if self._is_looking or self._is_closed:
                return
            self._is_looking = True
        # A daemon: whatever it waits for, the engine may end.
        threading.Thread(target=self._look, name="cachesvc-reconnect", daemon=True).start()

    def _look(self) -> None:
        told: AttachResult | None = None
        while not self._closing.wait(self._retry_s):
            self._retry_s = min(MAX_RETRY_S, 2 * self._retry_s)
            try:
                link = self._attempt(OPENING_S)
            except NodeAway as error:
                logger.debug("store: the node at %s is still away: %s", self._where, error)
            except AttachRefused as refused:
                if refused.result is not told:  # once for each reason: it may last
                    logger.warning("store: the node at %s is there and refuses: %s", self._where, refused)
                told = refused.result
            except Exception:  # whatever it is, the next attempt may do better, and nobody else makes one
                logger.exception("store: connecting to the node at %s", self._where)
            else:
                if self._take(link):
                    return
        with self._state:
            self._is_looking = False

    def _take(self, link: StoreLink) -> bool:
        """Hands the link to the calls. False: the store was closed meanwhile."""
        with self._state:
            if not self._is_closed:
                self._back()
                self._is_looking = False
                self._link = link
                return True
        link.leave()
        return False
