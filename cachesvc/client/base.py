"""What an engine may ask of a node, whichever way it reaches it.

AttachRefused (RuntimeError)   the node will not serve this engine: every field that differs, with both values
NodeAway (ConnectionError)     attach found no node to ask
SessionClosed (RuntimeError)   the call came after `detach` or after the node closed

No verb waits for I/O, except `drain` and `detach`, which are bounded. Every op ends with exactly one `OpEnded`, after
every one of its pages has had exactly one outcome. One client belongs to one thread, apart from `fileno`, which any
event loop may watch.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from cachesvc.identity import Identity
from cachesvc.node.events import Event
from cachesvc.outcomes import AttachResult, Decline

if TYPE_CHECKING:
    from cachekernels.region import Region

I32 = NDArray[np.int32]
U32 = NDArray[np.uint32]
Keys = NDArray[np.uint8]  # [n, 32]


class AttachRefused(RuntimeError):
    """The node does not serve this engine. The message names each differing field with both values; `result` says the
    kind."""

    def __init__(self, message: str, result: AttachResult) -> None:
        super().__init__(message)
        self.result = result


class NodeAway(ConnectionError):
    """No node is there, or none that answers."""


class SessionClosed(RuntimeError):
    """The session has been detached, or its node closed."""


@dataclass(frozen=True)
class AttachRequest:
    """`group` names the engine (all ranks of one engine share it); `frame_bytes` must be the identity's
    `page_bytes()`.

    An engine that already has a region *offers* it: because the node it got it from has gone, or because no node was
    there when it started. The node takes its own handle of it; the caller keeps `offer`. `previous` is the session the
    engine had with this same node before its connection broke; an attach that names it is answered when nothing of
    that session touches the region any more. `has_device`: frames are registered with a GPU or RDMA device, whose
    transfers may outlast the engine's process by moments.
    """

    identity: Identity
    group: str
    num_frames: int
    frame_bytes: int
    offer: Region | None = None
    previous: int | None = None
    has_device: bool = False


@dataclass(frozen=True)
class Attachment:
    """What an attach grants. The session owns the region: it is mapped until `detach`, and closed after the last op
    on it.

    `has_pages`: the region's directory names pages from before (of this engine, or of one whose place it takes); the
    engine is their manager now and finds them with `region.records()`.

    `enabled` is False where the node cannot keep one of the engine's pools: `warning` says which, the region has one
    frame, lookups miss and every op is declined.
    """

    session_id: int
    region: Region
    namespace: bytes
    enabled: bool = True
    warning: str = ""
    has_pages: bool = False


@dataclass(frozen=True, slots=True)
class Lookup:
    """`num_pages` consecutive pages from the first one are known to be had. `pending_op` is set while slower tiers
    are asked for more: a `LookupDone` with the final number follows (then `OpEnded`)."""

    num_pages: int
    pending_op: int | None = None


@dataclass(frozen=True, slots=True)
class Declined:
    """The node did not accept the op: nothing was queued, no frame was lent, no event follows. Counted under
    `reason`."""

    reason: Decline


MAX_USED_PAGES = 2048
"""Of a prompt's beginning that one call tells to be in use: what costs the node well below a millisecond."""


class CacheClient(ABC):
    """One engine's session with a node."""

    @abstractmethod
    def attach(self, request: AttachRequest) -> Attachment:
        """Opens the session, once per client. AttachRefused: another identity in the group, geometry, memory, or ops
        on the region that still run."""

    def is_connected(self) -> bool:
        """Whether there is a node at the moment, as far as the last call has shown. Costs nothing."""
        return True

    @abstractmethod
    def publish(self, frames: I32) -> None:
        """Tells the node that the engine wrote these frames (records and generations done): others may find them by
        key."""

    @abstractmethod
    def lookup(self, keys: Keys) -> Lookup:
        """How many pages of the chain `keys` the node can provide, apart from the session's own frames. No memory, no
        lease."""

    @abstractmethod
    def used(self, keys: Keys) -> None:
        """Says that the first pages of a prompt, `keys` root side first, are in use in the engine's own memory, so that
        storage does not give them up before those behind them. At most `MAX_USED_PAGES`, the first ones; pages that
        storage does not have are passed over. Nothing is answered, and nothing is lost where it is not heard."""

    @abstractmethod
    def prefetch(self, keys: Keys, frames: I32, depths: U32) -> int | Declined:
        """Starts reading the chain `keys` into `frames`; `depths` are page positions in the prompt. Returns the op.

        The frames are LENT to the node: each one comes back with its page's outcome in `PagesRead`, in page order.
        OK: the frame holds the page, its record is written, its generation even. Anything else: the frame is the
        engine's again, its bytes are undefined and its generation odd if the node had begun to write it. The first
        page that is not OK ends the prefix; pages behind it may still be OK when they were read in the same slice.
        ValueError: a frame is lent already or not a frame.
        """

    @abstractmethod
    def cancel(self, op: int) -> None:
        """Gives an op up. Pages nobody has begun are answered CANCELLED at once, before those of the slice that runs:
        these are answered when it has ended (their frames are *quarantined* until then); then `OpEnded`. An op that
        has ended, or that the session does not know, is left alone."""

    @abstractmethod
    def backup(self, keys: Keys, frames: I32, depths: U32) -> int | Declined:
        """Queues pages for storage, root side first; ops of one session are stored in the order given. Returns the op.

        The frames stay the engine's, which must leave them unchanged until the page's outcome in `PagesStored`: OK or
        EXISTS when a tier holds the page, CHANGED when the frame was rewritten, else why not. The first page that
        fails ends the op.
        """

    @abstractmethod
    def poll(self) -> list[Event]:
        """All events since the last call, never blocking. Pages of one op come in order, apart from those that
        `cancel` cut off; `OpEnded` comes last."""

    @abstractmethod
    def fileno(self) -> int:
        """An eventfd: readable while events wait. Owned by the session; only watch it."""

    @abstractmethod
    def drain(self, timeout_s: float) -> int:
        """Declines new work, cancels reads, and waits for backups at most `timeout_s`. What is then still queued is
        dropped from the leaf side, so that a contiguous prefix is stored. Returns ops that did not end by themselves;
        `poll` tells the pages."""

    @abstractmethod
    def detach(self) -> None:
        """Ends the session, dropping what has not begun. Idempotent. The region is closed when nobody writes it any
        more."""

    @abstractmethod
    def counters(self) -> Mapping[str, float]:
        """Every counter and gauge of the node by `name{label="value",...}`."""
