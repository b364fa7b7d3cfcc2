"""A client of a node in another process, over the local channel.

DESIGN. No call waits for the node longer than `call_timeout_s`, and most do not wait at all: prefetch, backup, cancel
and publish are sent and forgotten; what the node would decline, the client declines itself by the limits of the
Welcome. Calls send and receive on the engine's own thread, so that no thread switch is paid for. Where an answer does
not come in time the node counts as *silent*: nothing more is asked of it until it has answered.

Nothing raises into an engine that is attached. When the connection ends, a thread looks for the node (`reconnect`), and
until it is back lookups find nothing and ops are declined. Backups end at once; frames lent for reads come back when
the node confirms that it has let go of them, or is proven dead.

The descriptor to watch is an epoll over the socket and an eventfd, which stands for what needs no reading: events that
came with an answer, and the reconnecting thread's news.

A forked child has no session: its calls raise, and its copies of the descriptors are closed, so that the parent's end
is seen by the node.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import weakref
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
from cachekernels.region import Region, Side

from cachesvc.client.base import (
    I32,
    MAX_USED_PAGES,
    U32,
    Attachment,
    AttachRequest,
    CacheClient,
    Declined,
    Keys,
    Lookup,
    NodeAway,
    SessionClosed,
)
from cachesvc.client.conversation import Conversation
from cachesvc.client.counts import ClientCounters
from cachesvc.client.greeting import Dial, Greeted, greet_for, region_of
from cachesvc.client.ledger import Ledger
from cachesvc.client.link import Link, LinkBroken
from cachesvc.client.reconnect import Before, Reconnector
from cachesvc.client.watch import Watch
from cachesvc.node.arguments import check_keys, check_pages
from cachesvc.node.events import Event
from cachesvc.outcomes import Decline, Verb
from cachesvc.rpc import channel_pb2, codec, managed_pb2

logger = logging.getLogger(__name__)

MESSAGE_ROOM_BYTES = 4096  # of a message, for all that is not an array
PAGE_BYTES_IN_MESSAGE = 40  # key, frame, depth
PUBLISH_FRAMES = 256 << 10  # in one message
DRAIN_ANSWER_S = 1.0  # beyond the time that a drain was given


@dataclass(frozen=True)
class ChannelClientOptions:
    """How long a client waits, and how much it keeps."""

    call_timeout_s: float = 0.1
    attach_timeout_s: float = 120.0  # clearing many GiB takes its time
    max_queued_bytes: int = 8 << 20  # what the node has not read yet; at least two messages


class ChannelClient(CacheClient):
    """One engine's session with the node that `dial` connects to. For one thread."""

    def __init__(self, dial: Dial, options: ChannelClientOptions | None = None) -> None:
        self._dial = dial
        self._options = options or ChannelClientOptions()
        self._counters = ClientCounters()
        self._counters.registry.gauge(
            "cachesvc_client_connected", "1 with a connection", lambda: float(self.is_connected())
        )
        self._watch = Watch()
        self._pid = os.getpid()
        self._ids = itertools.count(1)
        self._request: AttachRequest | None = None
        self._region: Region | None = None
        self._ledger = Ledger(0)
        self._unpublished = np.zeros(0, np.bool_)  # frames whose publication could not be sent yet
        self._has_unpublished = False
        self._uncancelled: set[int] = set()  # ops whose cancelling could not be sent yet
        self._welcome = channel_pb2.Welcome()  # of the newest session
        self._link: Link | None = None
        self._talk: Conversation | None = None
        self._reconnector: Reconnector | None = None
        self._max_keys = 0  # in one message
        self._is_draining = False
        self._is_detached = False
        _clients.add(self)

    def attach(self, request: AttachRequest) -> Attachment:
        """See `CacheClient.attach`. NodeAway: no node answers, and the request has no `offer`; with one the client is
        attached all the same, to nobody, and looks for a node in the background. The region of the attachment is
        `offer` then, or if the node takes it."""
        if self._request is not None:
            raise RuntimeError(f"this client is attached already, as session {self._welcome.session_id}")
        self._check_process()
        try:
            greeted = greet_for(request, self._dial, self._options.attach_timeout_s)
        except NodeAway:
            if request.offer is None:
                raise
            return self._begin_alone(request, request.offer)
        try:
            region = region_of(greeted, request)
            self._begin(request, region)
        except OSError:
            greeted.close()
            raise
        self._connect(greeted)
        welcome = self._welcome
        return Attachment(
            welcome.session_id, region, welcome.namespace, welcome.enabled, welcome.warning, welcome.has_pages
        )

    def is_connected(self) -> bool:
        return self._link is not None

    def publish(self, frames: I32) -> None:
        self._enter()
        if not self._welcome.enabled or not len(frames):
            return
        self._ledger.check_frames(frames)
        if self._has_unpublished or not self._publish(frames):
            self._unpublished[frames] = self._has_unpublished = True

    def lookup(self, keys: Keys) -> Lookup:
        """See `CacheClient.lookup`. Of a chain longer than a message, the leading part is asked for."""
        self._enter()
        check_keys(keys)
        if not self._welcome.enabled or not len(keys):
            return Lookup(0)
        reason = self._why_unheard()
        if reason is not None:
            self._decline(Verb.LOOKUP, reason)
            return Lookup(0)
        op, keys = next(self._ids), keys[: self._max_keys]
        assert self._talk is not None, "it could be asked"
        try:
            found = self._talk.look_up(op, keys, self._options.call_timeout_s)
        except LinkBroken as error:
            self._ledger.forget(op)  # nobody has been told of it
            self._break(error)
            return Lookup(0)
        self._asked(found is not None)
        if found is None:
            self._ledger.unwanted(op)
            self.cancel(op)
            return Lookup(0)
        return found

    def used(self, keys: Keys) -> None:
        self._enter()
        check_keys(keys)
        if self._welcome.takes_used and len(keys) and self._why_unheard() is None:
            self._post(channel_pb2.ToNode(used=managed_pb2.Used(prefix=keys[:MAX_USED_PAGES].tobytes())))

    def prefetch(self, keys: Keys, frames: I32, depths: U32) -> int | Declined:
        self._enter()
        check_pages(keys, frames, depths)
        reason = self._why_not(len(keys))
        if reason is not None:
            return self._decline(Verb.PREFETCH, reason)
        self._ledger.check_loan(frames)
        op = next(self._ids)
        if not self._post(channel_pb2.ToNode(prefetch=codec.pages_message(op, keys, frames, depths))):
            return self._decline(Verb.PREFETCH, self._why_unsent())
        self._ledger.read(op, frames)
        return op

    def cancel(self, op: int) -> None:
        self._enter()
        is_running = self._talk is not None and self._ledger.is_running(op)  # else it is over with the connection
        if is_running and not self._post(channel_pb2.ToNode(cancel=channel_pb2.Cancel(op=op))):
            self._uncancelled.add(op)

    def backup(self, keys: Keys, frames: I32, depths: U32) -> int | Declined:
        self._enter()
        check_pages(keys, frames, depths)
        self._ledger.check_frames(frames)
        reason = self._why_not_store(len(keys))
        if reason is not None:
            return self._decline(Verb.BACKUP, reason)
        op = next(self._ids)
        if not self._post(channel_pb2.ToNode(backup=codec.pages_message(op, keys, frames, depths))):
            return self._decline(Verb.BACKUP, self._why_unsent())
        self._ledger.store(op, len(keys))
        return op

    def poll(self) -> list[Event]:
        self._check_session()
        self._watch.lower_flag()  # before looking: what comes while we look raises it again
        self._take_news()
        self._listen()
        if self._has_unpublished or self._uncancelled:
            self._send_rest()
        return self._ledger.poll()

    def fileno(self) -> int:
        """See `CacheClient.fileno`. May be readable without an event: the node said something else."""
        return self._watch.fileno()

    def drain(self, timeout_s: float) -> int:
        self._enter()
        self._is_draining = True
        asked = channel_pb2.ToNode(drain=channel_pb2.Drain(timeout_s=max(0.0, timeout_s)))
        answer = self._call(asked, max(0.0, timeout_s) + DRAIN_ANSWER_S)
        return self._ledger.num_running if answer is None else answer.drained.num_given_up

    def detach(self) -> None:
        if self._request is None or self._is_detached:
            return
        self._check_process()
        self._is_detached = True
        if self._reconnector is not None:
            self._reconnector.stop()
        if self._talk is not None:
            self._say_goodbye(self._talk)
        self._watch.close()
        assert self._region is not None, "attached with a region"
        self._region.close()

    def counters(self) -> Mapping[str, float]:
        """See `CacheClient.counters`; and this client's own, which are there without a node too."""
        self._enter()
        answer = self._call(channel_pb2.ToNode(counters=channel_pb2.CountersRequest()), self._options.call_timeout_s)
        node = {} if answer is None else dict(answer.counters.values)
        return {**node, **self._counters.registry.snapshot()}

    # ---- the session

    def _begin(self, request: AttachRequest, region: Region) -> None:
        region.hold(Side.ENGINE)
        self._request, self._region = replace(request, offer=None, previous=None), region
        self._ledger = Ledger(region.num_frames)
        self._unpublished = np.zeros(region.num_frames, np.bool_)

    def _begin_alone(self, request: AttachRequest, region: Region) -> Attachment:
        self._begin(request, region)
        unsupported = request.identity.unsupported_pools()
        warning = f"cache off: no node keeps pools of kind {', '.join(unsupported)}" if unsupported else ""
        self._welcome.namespace = request.identity.namespace()
        self._welcome.enabled = not unsupported
        self._look_for_node()
        return Attachment(0, region, self._welcome.namespace, not unsupported, warning)

    def _connect(self, greeted: Greeted) -> None:
        greeted.close_fds()
        self._welcome = greeted.welcome
        max_message_bytes = self._welcome.limits.max_message_bytes
        self._link = Link(greeted.sock, max_message_bytes, self._options.max_queued_bytes)
        self._talk = Conversation(self._link, self._ledger, self._counters.errors)
        self._max_keys = (max_message_bytes - MESSAGE_ROOM_BYTES) // codec.KEY_BYTES
        self._watch.add(self._link)

    def _break(self, error: LinkBroken) -> None:
        """The connection has ended; of what becomes of the node, nothing is known."""
        assert self._link is not None, "there was a connection"
        logger.warning("session %d lost its node: %s", self._welcome.session_id, error)
        self._counters.lost.inc()
        self._watch.remove(self._link)
        self._link.close()
        self._link = self._talk = None
        self._ledger.end_all(lambda verb: verb is not Verb.PREFETCH)
        self._watch.raise_flag()
        self._look_for_node()

    def _look_for_node(self) -> None:
        assert self._request is not None and self._region is not None, "attached"
        before = Before(self._welcome.session_id, self._welcome.boot_id, self._ledger.has_reads)
        self._reconnector = Reconnector(
            self._dial, self._request, self._region, before, self._options.attach_timeout_s, self._watch.raise_flag
        )

    def _take_news(self) -> None:
        """Frames that were lent before the connection ended are ours again, whichever news it is."""
        reconnector = self._reconnector
        if reconnector is None:
            return
        while self._link is None and reconnector.news:
            news = reconnector.news.popleft()
            self._ledger.end_all(lambda verb: verb is Verb.PREFETCH)
            if news.greeted is not None:
                reconnector.stop()
                self._reconnector = None
                self._connect(news.greeted)
                self._counters.reconnects.inc()
                logger.info("session %d with a node again", self._welcome.session_id)
                self._unpublished |= news.readable
                self._has_unpublished = True
                self._send_rest()
        if self._ledger.has_events:
            self._watch.raise_flag()

    def _say_goodbye(self, talk: Conversation) -> None:
        assert self._link is not None, "there is a connection"
        with contextlib.suppress(LinkBroken):  # it is gone already
            talk.call(channel_pb2.ToNode(detach=channel_pb2.Detach()), self._options.call_timeout_s)
        self._watch.remove(self._link)
        self._link.close()

    # ---- speaking

    def _enter(self) -> None:
        """Before each verb. SessionClosed; RuntimeError in a forked child."""
        self._check_session()
        self._take_news()

    def _check_session(self) -> None:
        self._check_process()
        if self._request is None or self._is_detached:
            raise SessionClosed("this client is not attached" if self._request is None else "this client has detached")

    def _check_process(self) -> None:
        if os.getpid() != self._pid:
            raise RuntimeError(
                "this client was made before a fork and belongs to the parent process; make one in the child"
            )

    def _post(self, message: channel_pb2.ToNode) -> bool:
        """False: there is no connection, or it takes no more for now."""
        if self._talk is None or self._link is None:
            return False
        try:
            is_posted = self._talk.post(message)
            self._watch.update(self._link)
        except LinkBroken as error:
            self._break(error)
            return False
        return is_posted

    def _listen(self) -> None:
        if self._talk is None or self._link is None:
            return
        try:
            self._talk.listen()
            self._watch.update(self._link)
        except LinkBroken as error:
            self._break(error)

    def _call(self, message: channel_pb2.ToNode, timeout_s: float) -> channel_pb2.ToClient | None:
        """None: no answer, for whatever reason."""
        if self._why_unheard() is not None or self._talk is None:
            return None
        try:
            answer = self._talk.call(message, timeout_s)
        except LinkBroken as error:
            self._break(error)
            return None
        self._asked(answer is not None)
        return answer

    def _asked(self, is_answered: bool) -> None:
        """After a call, on a connection that holds."""
        assert self._talk is not None and self._link is not None, "there was a connection"
        self._watch.update(self._link)
        if not is_answered and self._talk.is_silent:
            self._counters.timeouts.inc()
        if self._ledger.has_events:
            self._watch.raise_flag()

    def _publish(self, frames: I32) -> bool:
        """False: not all of it could be sent."""
        return all(
            self._post(channel_pb2.ToNode(publish=channel_pb2.Publish(frames=codec.frames_bytes(chunk))))
            for chunk in (frames[first : first + PUBLISH_FRAMES] for first in range(0, len(frames), PUBLISH_FRAMES))
        )

    def _send_rest(self) -> None:
        """What could not be sent when it was said, because there was no connection or no room."""
        for op in list(self._uncancelled):
            self._uncancelled.discard(op)
            self.cancel(op)
        frames = np.flatnonzero(self._unpublished).astype(np.int32)
        if self._publish(frames):
            self._unpublished[:] = self._has_unpublished = False

    # ---- declining

    def _why_unheard(self) -> Decline | None:
        """Why the node cannot be asked now."""
        if self._talk is not None and self._talk.is_silent:
            self._listen()
        if self._talk is None:
            return Decline.NODE_AWAY
        return Decline.NODE_SILENT if self._talk.is_silent else None

    def _why_unsent(self) -> Decline:
        return Decline.NODE_AWAY if self._talk is None else Decline.OUTPUT_FULL

    def _why_not(self, num_pages: int) -> Decline | None:
        if not self._welcome.enabled:
            return Decline.CACHE_OFF
        reason = self._why_unheard()
        if reason is not None:
            return reason
        if self._is_draining:
            return Decline.DRAINING
        if len(self._ledger) >= self._welcome.limits.max_ops:
            return Decline.TOO_MANY_OPS
        return Decline.TOO_LARGE if num_pages > self._max_keys * codec.KEY_BYTES // PAGE_BYTES_IN_MESSAGE else None

    def _why_not_store(self, num_pages: int) -> Decline | None:
        if self._talk is not None and not self._welcome.tiers:
            return Decline.NO_TIER
        reason = self._why_not(num_pages)
        limit = self._welcome.limits.max_waiting_store_pages
        if reason is None and self._ledger.waiting_store_pages + num_pages > limit:
            return Decline.QUEUE_FULL
        return reason

    def _decline(self, verb: Verb, reason: Decline) -> Declined:
        self._counters.declined.inc(1, verb, reason)
        return Declined(reason)

    def forget_everything(self) -> None:
        """In a forked child: closes its copies of the descriptors, which are the parent's to use."""
        if self._link is not None:
            self._link.close()
        if self._reconnector is not None:
            self._reconnector.forget()
        self._watch.close()


_clients: weakref.WeakSet[ChannelClient] = weakref.WeakSet()


def _forget_in_child() -> None:
    for client in list(_clients):
        client.forget_everything()


os.register_at_fork(after_in_child=_forget_in_child)
