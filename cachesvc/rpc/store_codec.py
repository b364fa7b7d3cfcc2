"""Messages of node-managed memory <-> our types. What comes from outside is checked here, once."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from cachesvc.node.store_requests import Answer, Cleared, Committed, Deleted, Found, Held, Reserved
from cachesvc.node.store_sessions import StoreRequest
from cachesvc.outcomes import Reject
from cachesvc.rpc import managed_pb2
from cachesvc.rpc.codec import BadMessage, Keys, frames_bytes, frames_of, keys_of
from storage_backends.base import Outcome, Outcomes

U32 = NDArray[np.uint32]
U64 = NDArray[np.uint64]

LAST_OUTCOME = np.uint8(max(Outcome))
MAX_BYTES = 1 << 50  # of a page or a slab; more cannot be meant


def open_message(request: StoreRequest, boot_id: bytes = b"") -> managed_pb2.OpenStore:
    """`boot_id`: of the node that gave `request.previous`."""
    return managed_pb2.OpenStore(
        tenant=request.tenant,
        namespace=request.namespace,
        page_bytes=request.page_bytes,
        memory_bytes=request.memory_bytes,
        previous_session_id=request.previous or 0,
        previous_boot_id=boot_id,
    )


def open_request(message: managed_pb2.OpenStore, boot_id: bytes) -> StoreRequest:
    """`boot_id`: this node's; sessions of another one are none of its own. BadMessage."""
    for name, value in (("page_bytes", message.page_bytes), ("memory_bytes", message.memory_bytes)):
        if value > MAX_BYTES:
            raise BadMessage(Reject.BAD_VALUE, f"{name} of {value} cannot be meant")
    previous = message.previous_session_id if message.previous_boot_id == boot_id else 0
    return StoreRequest(message.tenant, message.namespace, message.page_bytes, message.memory_bytes, previous or None)


def pages_of(message: managed_pb2.Reserve | managed_pb2.Get) -> tuple[Keys, U32, Keys]:
    """keys [n, 32], depths [n], prefix [m, 32]. BadMessage: not whole ones, or not of one length."""
    keys, depths = keys_of(message.keys), frames_of(message.depths).view(np.uint32)
    if len(keys) != len(depths):
        raise BadMessage(Reject.BAD_LENGTH, f"{len(keys)} keys and {len(depths)} depths do not belong together")
    return keys, depths, keys_of(message.prefix)


def answer_message(answer: Answer) -> managed_pb2.FromStore:
    """What the node says to a call."""
    match answer:
        case Reserved(call, results, frames):
            reserved = managed_pb2.Reserved(outcomes=results.tobytes(), frames=frames_bytes(frames))
            return managed_pb2.FromStore(call=call, reserved=reserved)
        case Found(call, results, frames, generations):
            found = managed_pb2.Found(
                outcomes=results.tobytes(),
                frames=frames_bytes(frames),
                generations=generations.astype("<u8", copy=False).tobytes(),
            )
            return managed_pb2.FromStore(call=call, found=found)
        case Committed(call, results):
            return managed_pb2.FromStore(call=call, committed=_outcomes(results))
        case Held(call, results):
            return managed_pb2.FromStore(call=call, held=_outcomes(results))
        case Deleted(call, results):
            return managed_pb2.FromStore(call=call, deleted=_outcomes(results))
        case Cleared(call, outcome, num_pages):
            cleared = managed_pb2.Cleared(outcome=int(outcome), num_pages=num_pages)
            return managed_pb2.FromStore(call=call, cleared=cleared)


def outcomes_of(data: bytes, count: int) -> Outcomes:
    """uint8 [count], a copy; what a newer node may say and this version does not know is FAILED, which is no page.
    BadMessage: another number of them."""
    if len(data) != count:
        raise BadMessage(Reject.BAD_LENGTH, f"{len(data)} outcomes of {count} pages")
    results = np.frombuffer(data, np.uint8).copy()
    results[results > LAST_OUTCOME] = Outcome.FAILED
    return results


def outcome_of(message: managed_pb2.Cleared) -> Outcome:
    """BadMessage: none that this version knows."""
    try:
        return Outcome(message.outcome)
    except ValueError as error:
        raise BadMessage(Reject.BAD_VALUE, str(error)) from error


def generations_of(data: bytes) -> U64:
    """uint64 [n]. BadMessage: not a whole number of them."""
    if len(data) % 8:
        raise BadMessage(Reject.BAD_LENGTH, f"generations of {len(data)} bytes; each has 8")
    return np.frombuffer(data, "<u8").astype(np.uint64, copy=False)


def _outcomes(results: Outcomes) -> managed_pb2.Outcomes:
    return managed_pb2.Outcomes(outcomes=results.tobytes())
