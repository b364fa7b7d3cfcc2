from cachesvc.rpc import common_pb2 as _common_pb2
from cachesvc.rpc import managed_pb2 as _managed_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Hello(_message.Message):
    __slots__ = ("versions", "client", "pid", "attach", "probe", "open_store")
    VERSIONS_FIELD_NUMBER: _ClassVar[int]
    CLIENT_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    ATTACH_FIELD_NUMBER: _ClassVar[int]
    PROBE_FIELD_NUMBER: _ClassVar[int]
    OPEN_STORE_FIELD_NUMBER: _ClassVar[int]
    versions: _common_pb2.Versions
    client: str
    pid: int
    attach: Attach
    probe: Probe
    open_store: _managed_pb2.OpenStore
    def __init__(self, versions: _Optional[_Union[_common_pb2.Versions, _Mapping]] = ..., client: _Optional[str] = ..., pid: _Optional[int] = ..., attach: _Optional[_Union[Attach, _Mapping]] = ..., probe: _Optional[_Union[Probe, _Mapping]] = ..., open_store: _Optional[_Union[_managed_pb2.OpenStore, _Mapping]] = ...) -> None: ...

class Attach(_message.Message):
    __slots__ = ("identity", "group", "num_frames", "frame_bytes", "has_offer", "previous", "has_device")
    IDENTITY_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    NUM_FRAMES_FIELD_NUMBER: _ClassVar[int]
    FRAME_BYTES_FIELD_NUMBER: _ClassVar[int]
    HAS_OFFER_FIELD_NUMBER: _ClassVar[int]
    PREVIOUS_FIELD_NUMBER: _ClassVar[int]
    HAS_DEVICE_FIELD_NUMBER: _ClassVar[int]
    identity: _common_pb2.Identity
    group: str
    num_frames: int
    frame_bytes: int
    has_offer: bool
    previous: Previous
    has_device: bool
    def __init__(self, identity: _Optional[_Union[_common_pb2.Identity, _Mapping]] = ..., group: _Optional[str] = ..., num_frames: _Optional[int] = ..., frame_bytes: _Optional[int] = ..., has_offer: bool = ..., previous: _Optional[_Union[Previous, _Mapping]] = ..., has_device: bool = ...) -> None: ...

class Previous(_message.Message):
    __slots__ = ("session_id", "boot_id")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    session_id: int
    boot_id: bytes
    def __init__(self, session_id: _Optional[int] = ..., boot_id: _Optional[bytes] = ...) -> None: ...

class Probe(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class HelloReply(_message.Message):
    __slots__ = ("welcome", "refused", "opening")
    WELCOME_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    OPENING_FIELD_NUMBER: _ClassVar[int]
    welcome: Welcome
    refused: _common_pb2.Refused
    opening: Opening
    def __init__(self, welcome: _Optional[_Union[Welcome, _Mapping]] = ..., refused: _Optional[_Union[_common_pb2.Refused, _Mapping]] = ..., opening: _Optional[_Union[Opening, _Mapping]] = ...) -> None: ...

class Opening(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Welcome(_message.Message):
    __slots__ = ("session_id", "boot_id", "versions", "limits", "namespace", "enabled", "warning", "has_region", "has_pages", "tiers", "pid", "store", "takes_used")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    VERSIONS_FIELD_NUMBER: _ClassVar[int]
    LIMITS_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    ENABLED_FIELD_NUMBER: _ClassVar[int]
    WARNING_FIELD_NUMBER: _ClassVar[int]
    HAS_REGION_FIELD_NUMBER: _ClassVar[int]
    HAS_PAGES_FIELD_NUMBER: _ClassVar[int]
    TIERS_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    STORE_FIELD_NUMBER: _ClassVar[int]
    TAKES_USED_FIELD_NUMBER: _ClassVar[int]
    session_id: int
    boot_id: bytes
    versions: _common_pb2.Versions
    limits: _common_pb2.Limits
    namespace: bytes
    enabled: bool
    warning: str
    has_region: bool
    has_pages: bool
    tiers: _containers.RepeatedCompositeFieldContainer[_common_pb2.Tier]
    pid: int
    store: _managed_pb2.StoreOpened
    takes_used: bool
    def __init__(self, session_id: _Optional[int] = ..., boot_id: _Optional[bytes] = ..., versions: _Optional[_Union[_common_pb2.Versions, _Mapping]] = ..., limits: _Optional[_Union[_common_pb2.Limits, _Mapping]] = ..., namespace: _Optional[bytes] = ..., enabled: bool = ..., warning: _Optional[str] = ..., has_region: bool = ..., has_pages: bool = ..., tiers: _Optional[_Iterable[_Union[_common_pb2.Tier, _Mapping]]] = ..., pid: _Optional[int] = ..., store: _Optional[_Union[_managed_pb2.StoreOpened, _Mapping]] = ..., takes_used: bool = ...) -> None: ...

class ToNode(_message.Message):
    __slots__ = ("call", "lookup", "publish", "prefetch", "backup", "cancel", "drain", "detach", "counters", "ping", "used")
    CALL_FIELD_NUMBER: _ClassVar[int]
    LOOKUP_FIELD_NUMBER: _ClassVar[int]
    PUBLISH_FIELD_NUMBER: _ClassVar[int]
    PREFETCH_FIELD_NUMBER: _ClassVar[int]
    BACKUP_FIELD_NUMBER: _ClassVar[int]
    CANCEL_FIELD_NUMBER: _ClassVar[int]
    DRAIN_FIELD_NUMBER: _ClassVar[int]
    DETACH_FIELD_NUMBER: _ClassVar[int]
    COUNTERS_FIELD_NUMBER: _ClassVar[int]
    PING_FIELD_NUMBER: _ClassVar[int]
    USED_FIELD_NUMBER: _ClassVar[int]
    call: int
    lookup: Lookup
    publish: Publish
    prefetch: Pages
    backup: Pages
    cancel: Cancel
    drain: Drain
    detach: Detach
    counters: CountersRequest
    ping: Ping
    used: _managed_pb2.Used
    def __init__(self, call: _Optional[int] = ..., lookup: _Optional[_Union[Lookup, _Mapping]] = ..., publish: _Optional[_Union[Publish, _Mapping]] = ..., prefetch: _Optional[_Union[Pages, _Mapping]] = ..., backup: _Optional[_Union[Pages, _Mapping]] = ..., cancel: _Optional[_Union[Cancel, _Mapping]] = ..., drain: _Optional[_Union[Drain, _Mapping]] = ..., detach: _Optional[_Union[Detach, _Mapping]] = ..., counters: _Optional[_Union[CountersRequest, _Mapping]] = ..., ping: _Optional[_Union[Ping, _Mapping]] = ..., used: _Optional[_Union[_managed_pb2.Used, _Mapping]] = ...) -> None: ...

class Lookup(_message.Message):
    __slots__ = ("op", "keys")
    OP_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    op: int
    keys: bytes
    def __init__(self, op: _Optional[int] = ..., keys: _Optional[bytes] = ...) -> None: ...

class Publish(_message.Message):
    __slots__ = ("frames",)
    FRAMES_FIELD_NUMBER: _ClassVar[int]
    frames: bytes
    def __init__(self, frames: _Optional[bytes] = ...) -> None: ...

class Pages(_message.Message):
    __slots__ = ("op", "keys", "frames", "depths")
    OP_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    FRAMES_FIELD_NUMBER: _ClassVar[int]
    DEPTHS_FIELD_NUMBER: _ClassVar[int]
    op: int
    keys: bytes
    frames: bytes
    depths: bytes
    def __init__(self, op: _Optional[int] = ..., keys: _Optional[bytes] = ..., frames: _Optional[bytes] = ..., depths: _Optional[bytes] = ...) -> None: ...

class Cancel(_message.Message):
    __slots__ = ("op",)
    OP_FIELD_NUMBER: _ClassVar[int]
    op: int
    def __init__(self, op: _Optional[int] = ...) -> None: ...

class Drain(_message.Message):
    __slots__ = ("timeout_s",)
    TIMEOUT_S_FIELD_NUMBER: _ClassVar[int]
    timeout_s: float
    def __init__(self, timeout_s: _Optional[float] = ...) -> None: ...

class Detach(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class CountersRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Ping(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ToClient(_message.Message):
    __slots__ = ("call", "events", "lookup", "drained", "counters", "pong", "declined", "error", "detached")
    CALL_FIELD_NUMBER: _ClassVar[int]
    EVENTS_FIELD_NUMBER: _ClassVar[int]
    LOOKUP_FIELD_NUMBER: _ClassVar[int]
    DRAINED_FIELD_NUMBER: _ClassVar[int]
    COUNTERS_FIELD_NUMBER: _ClassVar[int]
    PONG_FIELD_NUMBER: _ClassVar[int]
    DECLINED_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    DETACHED_FIELD_NUMBER: _ClassVar[int]
    call: int
    events: Events
    lookup: LookupReply
    drained: Drained
    counters: _common_pb2.Counters
    pong: Pong
    declined: Declined
    error: _common_pb2.Error
    detached: Detached
    def __init__(self, call: _Optional[int] = ..., events: _Optional[_Union[Events, _Mapping]] = ..., lookup: _Optional[_Union[LookupReply, _Mapping]] = ..., drained: _Optional[_Union[Drained, _Mapping]] = ..., counters: _Optional[_Union[_common_pb2.Counters, _Mapping]] = ..., pong: _Optional[_Union[Pong, _Mapping]] = ..., declined: _Optional[_Union[Declined, _Mapping]] = ..., error: _Optional[_Union[_common_pb2.Error, _Mapping]] = ..., detached: _Optional[_Union[Detached, _Mapping]] = ...) -> None: ...

class LookupReply(_message.Message):
    __slots__ = ("num_pages", "is_pending")
    NUM_PAGES_FIELD_NUMBER: _ClassVar[int]
    IS_PENDING_FIELD_NUMBER: _ClassVar[int]
    num_pages: int
    is_pending: bool
    def __init__(self, num_pages: _Optional[int] = ..., is_pending: bool = ...) -> None: ...

class Drained(_message.Message):
    __slots__ = ("num_given_up",)
    NUM_GIVEN_UP_FIELD_NUMBER: _ClassVar[int]
    num_given_up: int
    def __init__(self, num_given_up: _Optional[int] = ...) -> None: ...

class Pong(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Detached(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Declined(_message.Message):
    __slots__ = ("op", "reason")
    OP_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    op: int
    reason: str
    def __init__(self, op: _Optional[int] = ..., reason: _Optional[str] = ...) -> None: ...

class Events(_message.Message):
    __slots__ = ("events",)
    EVENTS_FIELD_NUMBER: _ClassVar[int]
    events: _containers.RepeatedCompositeFieldContainer[Event]
    def __init__(self, events: _Optional[_Iterable[_Union[Event, _Mapping]]] = ...) -> None: ...

class Event(_message.Message):
    __slots__ = ("op", "lookup_done", "read", "stored", "ended")
    OP_FIELD_NUMBER: _ClassVar[int]
    LOOKUP_DONE_FIELD_NUMBER: _ClassVar[int]
    READ_FIELD_NUMBER: _ClassVar[int]
    STORED_FIELD_NUMBER: _ClassVar[int]
    ENDED_FIELD_NUMBER: _ClassVar[int]
    op: int
    lookup_done: int
    read: PageOutcomes
    stored: PageOutcomes
    ended: str
    def __init__(self, op: _Optional[int] = ..., lookup_done: _Optional[int] = ..., read: _Optional[_Union[PageOutcomes, _Mapping]] = ..., stored: _Optional[_Union[PageOutcomes, _Mapping]] = ..., ended: _Optional[str] = ...) -> None: ...

class PageOutcomes(_message.Message):
    __slots__ = ("first_page", "outcomes")
    FIRST_PAGE_FIELD_NUMBER: _ClassVar[int]
    OUTCOMES_FIELD_NUMBER: _ClassVar[int]
    first_page: int
    outcomes: bytes
    def __init__(self, first_page: _Optional[int] = ..., outcomes: _Optional[bytes] = ...) -> None: ...
