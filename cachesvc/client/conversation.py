"""What a client and its node say to each other over one link, from the Welcome to the end of the connection."""

from __future__ import annotations

import itertools
import logging
import time

import numpy as np
from cachekernels.wires import Wire
from numpy.typing import NDArray

from cachesvc.client.base import Lookup
from cachesvc.client.ledger import Ledger
from cachesvc.client.link import Link, LinkBroken
from cachesvc.metrics import Counter
from cachesvc.outcomes import OpEnd, Reject
from cachesvc.rpc import channel_pb2, codec, common_pb2
from cachesvc.rpc.codec import BadMessage
from cachesvc.rpc.framing import to_frame
from storage_backends.base import Outcome

logger = logging.getLogger(__name__)


class Conversation:
    """Calls, and what comes without being asked for, which goes into `ledger`. For one thread.

    Every method raises LinkBroken when the connection has ended, or the node says what cannot be meant.
    """

    def __init__(self, link: Link, ledger: Ledger, errors: Counter) -> None:
        self._link = link
        self._ledger = ledger
        self._errors = errors
        self._calls = itertools.count(1)
        self._owed_call = 0  # asked, not answered in time
        self._owed_op = 0
        self._answer: channel_pb2.ToClient | None = None

    @property
    def is_silent(self) -> bool:
        """The node owes an answer, as far as what has been received tells."""
        return self._owed_call > 0

    def post(self, message: channel_pb2.ToNode) -> bool:
        """Says something that has no answer. False, nothing said: too much waits to be sent."""
        return self._link.post(to_frame(message))

    def call(self, message: channel_pb2.ToNode, timeout_s: float) -> channel_pb2.ToClient | None:
        """Asks and waits for the answer. None: it did not come in time (the node is silent from now on), or the
        question could not be sent."""
        call = message.call = next(self._calls)
        if not self.post(message):
            return None
        return self._wait(call, time.monotonic() + timeout_s)

    def look_up(self, op: int, keys: NDArray[np.uint8], timeout_s: float) -> Lookup | None:
        """The same for a lookup of `keys` [n, 32], which is told apart from all else natively: an answer by which no
        op begins, and before which nothing was said, leaves no trace here."""
        deadline_s = time.monotonic() + timeout_s
        call = next(self._calls)
        num_pages = self._link.look_up(call, op, keys, timeout_s)
        if num_pages >= 0:
            return Lookup(min(num_pages, len(keys)))
        if num_pages == Wire.UNASKED:
            return None
        self._ledger.look(op, len(keys))
        answer = self._wait(call, deadline_s, op)
        if answer is None:
            return None
        return Lookup(min(answer.lookup.num_pages, len(keys)), op if answer.lookup.is_pending else None)

    def _wait(self, call: int, deadline_s: float, op: int = 0) -> channel_pb2.ToClient | None:
        self._owed_call, self._owed_op, self._answer = call, op, None
        while self._owed_call == call:
            remaining_s = deadline_s - time.monotonic()
            if remaining_s <= 0:
                return None
            if not self._hear():
                self._link.wait(remaining_s)
        return self._answer

    def listen(self) -> None:
        """Takes in what has arrived and sends what waits. Never blocks."""
        while self._hear():
            pass

    def _hear(self) -> bool:
        """One helping of it. False: there was no whole message."""
        if self._link.is_writing:
            self._link.flush()
        messages = self._link.receive()
        for data in messages:
            self._take(data)
        return bool(messages)

    def _take(self, data: bytes) -> None:
        message = channel_pb2.ToClient()
        try:
            codec.parse(message, data)
            if message.call and message.call == self._owed_call:
                self._answered(message)
            else:
                self._told(message)
        except BadMessage as bad:
            raise LinkBroken(f"the node said what cannot be meant: {bad}") from bad

    def _answered(self, message: channel_pb2.ToClient) -> None:
        self._owed_call, self._answer = 0, message
        if self._owed_op and not message.lookup.is_pending:
            self._ledger.forget(self._owed_op)
        if message.HasField("error"):
            self._note(message.error)

    def _told(self, message: channel_pb2.ToClient) -> None:
        match message.WhichOneof("body"):
            case "events":
                for event in message.events.events:
                    self._ledger.take(codec.event_of(event))
            case "declined":
                self._ledger.end(message.declined.op, Outcome.CANCELLED, OpEnd.DECLINED)
            case "error":
                self._note(message.error)
                if message.error.op:
                    self._ledger.end(message.error.op, Outcome.CANCELLED, OpEnd.DECLINED)
            case _:
                pass  # the late answer to a call of long ago, or a newer node's

    def _note(self, error: common_pb2.Error) -> None:
        logger.warning("the node did not obey a message: %s (%s)", error.message, error.reason)
        self._errors.inc(1, error.reason if error.reason in REASONS else Reject.UNKNOWN)


REASONS = frozenset(str(reason) for reason in Reject)
