"""Looking for the node again, beside the engine.

DESIGN. A thread that lives from the loss of one connection to the next one. It touches nothing of the client's: it
leaves `News` in a queue and calls `wake`; the engine's thread takes them in at its next call.

Frames that were lent when the connection ended may still be written by the old node. That is settled before the client
attaches anew. The same node (same boot id) answers an attach that names the old session only when nothing of it touches
the region any more: that is the confirmation. Another node can confirm nothing, and once it holds the region too, the
lock no longer tells whether the old one is gone. So while frames are in doubt, the client first asks who is there, and
attaches to another node only after the old one is proven dead.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
from cachekernels.region import Region, Side
from numpy.typing import NDArray

from cachesvc.client.base import AttachRefused, AttachRequest, NodeAway
from cachesvc.client.greeting import Dial, Greeted, greet, new_hello
from cachesvc.rpc import codec

logger = logging.getLogger(__name__)

FIRST_RETRY_S = 0.02
MAX_ABSENT_RETRY_S = 0.5  # nobody is there: asking costs nothing, and a restarted node is to hit within a second
ABSENT_GROWTH = 1.1  # slowly: in the time that a daemon takes to start, each step is a tenth of what has passed
MAX_REFUSED_RETRY_S = 5.0
PROBE_TIMEOUT_S = 5.0


@dataclass(frozen=True)
class Before:
    """The session that was lost. `has_reads`: frames were lent. `boot_id` is empty where there never was a session."""

    session_id: int
    boot_id: bytes
    has_reads: bool


@dataclass
class News:
    """`greeted`: a new session; `readable` bool[num_frames] are the frames its node may not know of. Without: the old
    node is proven dead."""

    greeted: Greeted | None
    readable: NDArray[np.bool_]


class Reconnector:
    """The thread. `news` may be looked at from any thread; its sockets belong to whoever takes them out."""

    def __init__(
        self,
        dial: Dial,
        request: AttachRequest,
        region: Region,
        before: Before,
        attach_timeout_s: float,
        wake: Callable[[], None],
    ) -> None:
        """`request` as it was made first; `region` is what the engine has, and is offered."""
        self.news: deque[News] = deque()
        self._dial = dial
        self._request = replace(request, offer=region, previous=before.session_id or None)
        self._region = region
        self._before = before
        self._has_doubts = before.has_reads
        self._attach_timeout_s = attach_timeout_s
        self._wake = wake
        self._last_reason = ""
        self._is_over = threading.Event()
        self._sock: socket.socket | None = None
        self._thread = threading.Thread(target=self._run, name="cachesvc-reconnect", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Ends the thread and closes what nobody took."""
        self._is_over.set()
        sock = self._sock
        if sock is not None:
            with contextlib.suppress(OSError):  # it has ended by itself
                sock.shutdown(socket.SHUT_RDWR)  # it may wait for an answer
        self._thread.join()
        while self.news:
            news = self.news.popleft()
            if news.greeted is not None:
                news.greeted.close()

    def forget(self) -> None:
        """In a forked child, where the thread does not exist: closes the child's copy of what it had open."""
        sock = self._sock
        if sock is not None:
            sock.close()

    def _run(self) -> None:
        retry_s = FIRST_RETRY_S
        while not self._is_over.wait(retry_s):
            try:
                if self._attempt():
                    return
            except AttachRefused as refused:
                self._note(refused.result, str(refused))
                retry_s = min(2 * retry_s, MAX_REFUSED_RETRY_S)
            except OSError as away:
                self._note(str(away), str(away))
                retry_s = min(ABSENT_GROWTH * retry_s, MAX_ABSENT_RETRY_S)
            except Exception:
                logger.exception("looking for the node failed")
                retry_s = MAX_REFUSED_RETRY_S

    def _attempt(self) -> bool:
        """True: there is a session again. OSError, AttachRefused: not now."""
        self._settle_by_proof()
        if self._has_doubts and self._boot_id_now() != self._before.boot_id:
            self._settle_by_proof()  # the old one may have died while we asked
            if self._has_doubts:
                raise NodeAway("another node is there, and the one before is not proven dead")
        hello = new_hello()
        hello.attach.CopyFrom(codec.attach_message(self._request, self._before.boot_id))
        region = self._region
        greeted = greet(self._connected(), hello, (region.data_fd, region.directory_fd), self._attach_timeout_s)
        if greeted.welcome.has_region:
            greeted.close()
            raise NodeAway("the node gives another region than the one offered")
        generations = region.records().generations
        self._sock = None  # the session's from now on
        self._tell(News(greeted, (generations > 0) & (generations % 2 == 0)))
        return True

    def _settle_by_proof(self) -> None:
        if self._has_doubts and not self._region.is_held(Side.NODE):
            self._has_doubts = False
            self._tell(News(None, np.zeros(self._region.num_frames, np.bool_)))

    def _boot_id_now(self) -> bytes:
        hello = new_hello()
        hello.probe.SetInParent()
        greeted = greet(self._connected(), hello, (), PROBE_TIMEOUT_S)
        greeted.close()
        return greeted.welcome.boot_id

    def _connected(self) -> socket.socket:
        sock = self._sock = self._dial()
        if self._is_over.is_set():  # else `stop` has seen the socket and ends whoever waits on it
            sock.close()
            raise NodeAway("the client has detached")
        return sock

    def _tell(self, news: News) -> None:
        self.news.append(news)
        self._wake()

    def _note(self, reason: str, message: str) -> None:
        """Once per reason: a node may stay away for days, and a refusal say with every try what it has now."""
        if reason != self._last_reason:
            logger.warning("no session with the node: %s", message)
        self._last_reason = reason
