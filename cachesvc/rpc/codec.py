"""Messages <-> our types. What comes from outside is checked here, once.

BadMessage (ValueError)   the message cannot be meant; `reason` says the kind, and nothing was done

Arrays decoded from a message are read-only views of its bytes.
"""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

import numpy as np
from cachekernels.region import Region
from google.protobuf.message import DecodeError, Message
from numpy.typing import NDArray

from cachesvc.client.base import AttachRequest
from cachesvc.identity import Identity
from cachesvc.node.events import Event, LookupDone, OpEnded, PagesRead, PagesStored
from cachesvc.outcomes import AttachResult, OpEnd, Reject
from cachesvc.rpc import channel_pb2, common_pb2
from storage_backends.base import Outcome, Outcomes

I32 = NDArray[np.int32]
U32 = NDArray[np.uint32]
Keys = NDArray[np.uint8]

PROTOCOL_VERSION = 1
REGION_VERSION = 1
KEY_BYTES = 32
MAX_FRAMES = 2**31 - 1  # frame numbers are i32
_MAX_FRAME_BYTES = 1 << 40


class BadMessage(ValueError):
    """A message that was not understood."""

    def __init__(self, reason: Reject, message: str) -> None:
        super().__init__(message)
        self.reason = reason


def parse(message: Message, data: bytes) -> None:
    """Fills `message` from the wire. BadMessage: it is none of that kind."""
    try:
        message.ParseFromString(data)
    except DecodeError as error:
        raise BadMessage(Reject.UNDECODABLE, f"{len(data)} bytes are not a {message.DESCRIPTOR.name}") from error


# versions


def versions() -> common_pb2.Versions:
    """Ours."""
    try:
        software = version("cachesvc")
    except PackageNotFoundError:  # imported from a tree that was never installed
        software = "unknown"
    return common_pb2.Versions(protocol=PROTOCOL_VERSION, region=REGION_VERSION, software=software)


def versions_text(said: common_pb2.Versions) -> str:
    """For a log line."""
    return f"protocol {said.protocol}, region {said.region}, cachesvc {said.software or 'unknown'}"


def version_mismatch(theirs: common_pb2.Versions, who: str) -> str:
    """Why two sides cannot speak to each other, with the versions of both; empty if they can."""
    ours = versions()
    if (ours.protocol, ours.region) == (theirs.protocol, theirs.region):
        return ""
    return f"versions differ: {versions_text(ours)} here; {versions_text(theirs)} at {who}"


# arrays


def keys_bytes(keys: Keys) -> bytes:
    """uint8 [n, 32]."""
    return keys.tobytes()


def keys_of(data: bytes) -> Keys:
    """uint8 [n, 32]. BadMessage: not a whole number of keys."""
    if len(data) % KEY_BYTES:
        raise BadMessage(Reject.BAD_LENGTH, f"keys of {len(data)} bytes; a key has {KEY_BYTES}")
    return np.ndarray((len(data) // KEY_BYTES, KEY_BYTES), np.uint8, data)


def frames_bytes(frames: I32) -> bytes:
    """int32 [n]."""
    return frames.astype("<i4", copy=False).tobytes()


def frames_of(data: bytes) -> I32:
    """int32 [n]. BadMessage: not a whole number of them."""
    return _words(data, "<i4", "frames").astype(np.int32, copy=False)


def pages_message(op: int, keys: Keys, frames: I32, depths: U32) -> channel_pb2.Pages:
    """n pages of one op."""
    return channel_pb2.Pages(
        op=op, keys=keys.tobytes(), frames=frames_bytes(frames), depths=depths.astype("<u4", copy=False).tobytes()
    )


def pages_of(message: channel_pb2.Pages) -> tuple[Keys, I32, U32]:
    """keys [n, 32], frames [n], depths [n], n at least 1. BadMessage: they are not of one length, or none."""
    keys, frames = keys_of(message.keys), frames_of(message.frames)
    depths = _words(message.depths, "<u4", "depths").astype(np.uint32, copy=False)
    if not len(keys) == len(frames) == len(depths):
        raise BadMessage(
            Reject.BAD_LENGTH, f"{len(keys)} keys, {len(frames)} frames, {len(depths)} depths do not belong together"
        )
    if not len(keys):
        raise BadMessage(Reject.BAD_LENGTH, "an op needs at least one page")
    return keys, frames, depths


def _words(data: bytes, dtype: str, name: str) -> NDArray[np.generic]:
    if len(data) % 4:
        raise BadMessage(Reject.BAD_LENGTH, f"{name} of {len(data)} bytes; each has 4")
    return np.frombuffer(data, dtype)


# attach


def identity_message(identity: Identity) -> common_pb2.Identity:
    """Every field of it."""
    return common_pb2.Identity(
        model_id=identity.model_id,
        weights_digest=identity.weights_digest,
        config_digest=identity.config_digest,
        dtype=identity.dtype,
        page_size=identity.page_size,
        num_layers=identity.num_layers,
        num_kv_heads=identity.num_kv_heads,
        head_dim=identity.head_dim,
        kv_layout=identity.kv_layout,
        kv_layout_version=identity.kv_layout_version,
        pools=identity.pools,
        rank_shape=[common_pb2.RankAxis(name=name, size=size) for name, size in identity.rank_shape],
        engine_layout=identity.engine_layout,
        key_scheme=identity.key_scheme,
    )


def identity_of(message: common_pb2.Identity) -> Identity:
    """BadMessage: impossible geometry."""
    try:
        return Identity(
            model_id=message.model_id,
            weights_digest=message.weights_digest,
            config_digest=message.config_digest,
            dtype=message.dtype,
            page_size=message.page_size,
            num_layers=message.num_layers,
            num_kv_heads=message.num_kv_heads,
            head_dim=message.head_dim,
            kv_layout=message.kv_layout,
            kv_layout_version=message.kv_layout_version,
            pools=tuple(message.pools),
            rank_shape=tuple((axis.name, axis.size) for axis in message.rank_shape),
            engine_layout=message.engine_layout,
            key_scheme=message.key_scheme,
        )
    except ValueError as error:
        raise BadMessage(Reject.BAD_VALUE, str(error)) from error


def attach_message(request: AttachRequest, boot_id: bytes = b"") -> channel_pb2.Attach:
    """`boot_id` is that of the node which gave `request.previous`. The descriptors of an offer travel beside it."""
    message = channel_pb2.Attach(
        identity=identity_message(request.identity),
        group=request.group,
        num_frames=request.num_frames,
        frame_bytes=request.frame_bytes,
        has_offer=request.offer is not None,
        has_device=request.has_device,
    )
    if request.previous is not None:
        message.previous.CopyFrom(channel_pb2.Previous(session_id=request.previous, boot_id=boot_id))
    return message


def attach_request(message: channel_pb2.Attach, boot_id: bytes, offer: Region | None) -> AttachRequest:
    """What is asked of the node with this boot id, to which a session of another node means nothing. BadMessage:
    numbers that cannot be meant."""
    if message.num_frames > MAX_FRAMES or message.frame_bytes > _MAX_FRAME_BYTES:
        raise BadMessage(
            Reject.BAD_VALUE, f"{message.num_frames} frames of {message.frame_bytes} bytes cannot be meant"
        )
    is_ours = message.HasField("previous") and message.previous.boot_id == boot_id
    return AttachRequest(
        identity_of(message.identity),
        message.group,
        message.num_frames,
        message.frame_bytes,
        offer,
        message.previous.session_id if is_ours else None,
        message.has_device,
    )


# events


def event_message(event: Event) -> channel_pb2.Event:
    """One event of an engine's session, under the op number it carries."""
    match event:
        case PagesRead(op, first_page, outcomes):
            pages = channel_pb2.PageOutcomes(first_page=first_page, outcomes=outcomes.tobytes())
            return channel_pb2.Event(op=op, read=pages)
        case PagesStored(op, first_page, outcomes):
            pages = channel_pb2.PageOutcomes(first_page=first_page, outcomes=outcomes.tobytes())
            return channel_pb2.Event(op=op, stored=pages)
        case LookupDone(op, num_pages):
            return channel_pb2.Event(op=op, lookup_done=num_pages)
        case OpEnded(op, reason):
            return channel_pb2.Event(op=op, ended=reason)


def event_of(message: channel_pb2.Event) -> Event:
    """BadMessage: an event that this version does not know."""
    match message.WhichOneof("what"):
        case "read":
            return PagesRead(message.op, message.read.first_page, _outcomes(message.read.outcomes))
        case "stored":
            return PagesStored(message.op, message.stored.first_page, _outcomes(message.stored.outcomes))
        case "lookup_done":
            return LookupDone(message.op, message.lookup_done)
        case "ended":
            return OpEnded(message.op, _op_end(message.ended))
        case _:
            raise BadMessage(Reject.UNKNOWN, f"an unknown event of op {message.op}")


def _outcomes(data: bytes) -> Outcomes:
    """uint8 [n]; what only a newer node knows is a failure."""
    results = np.frombuffer(data, np.uint8)
    return np.where(results > max(Outcome), Outcome.FAILED, results).astype(np.uint8)


def _op_end(text: str) -> OpEnd:
    """A reason of a newer node is one that this version would call a failure."""
    try:
        return OpEnd(text)
    except ValueError:
        return OpEnd.FAILED


def attach_result_of(text: str) -> AttachResult:
    """A reason of a newer node is a refusal by its own code."""
    try:
        return AttachResult(text)
    except ValueError:
        return AttachResult.REFUSED_FAILED
