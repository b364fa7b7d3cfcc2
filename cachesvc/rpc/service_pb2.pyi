from cachesvc.rpc import channel_pb2 as _channel_pb2
from cachesvc.rpc import common_pb2 as _common_pb2
from cachesvc.rpc import managed_pb2 as _managed_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class GetVersionRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetStatusRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class NodeStatus(_message.Message):
    __slots__ = ("versions", "boot_id", "is_ready", "reasons", "tiers", "sessions", "regions")
    VERSIONS_FIELD_NUMBER: _ClassVar[int]
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    IS_READY_FIELD_NUMBER: _ClassVar[int]
    REASONS_FIELD_NUMBER: _ClassVar[int]
    TIERS_FIELD_NUMBER: _ClassVar[int]
    SESSIONS_FIELD_NUMBER: _ClassVar[int]
    REGIONS_FIELD_NUMBER: _ClassVar[int]
    versions: _common_pb2.Versions
    boot_id: bytes
    is_ready: bool
    reasons: _containers.RepeatedScalarFieldContainer[str]
    tiers: _containers.RepeatedCompositeFieldContainer[TierStatus]
    sessions: _containers.RepeatedCompositeFieldContainer[SessionStatus]
    regions: _containers.RepeatedCompositeFieldContainer[RegionStatus]
    def __init__(self, versions: _Optional[_Union[_common_pb2.Versions, _Mapping]] = ..., boot_id: _Optional[bytes] = ..., is_ready: bool = ..., reasons: _Optional[_Iterable[str]] = ..., tiers: _Optional[_Iterable[_Union[TierStatus, _Mapping]]] = ..., sessions: _Optional[_Iterable[_Union[SessionStatus, _Mapping]]] = ..., regions: _Optional[_Iterable[_Union[RegionStatus, _Mapping]]] = ...) -> None: ...

class TierStatus(_message.Message):
    __slots__ = ("name", "backend", "place", "used_bytes", "capacity_bytes", "objects", "troubles")
    NAME_FIELD_NUMBER: _ClassVar[int]
    BACKEND_FIELD_NUMBER: _ClassVar[int]
    PLACE_FIELD_NUMBER: _ClassVar[int]
    USED_BYTES_FIELD_NUMBER: _ClassVar[int]
    CAPACITY_BYTES_FIELD_NUMBER: _ClassVar[int]
    OBJECTS_FIELD_NUMBER: _ClassVar[int]
    TROUBLES_FIELD_NUMBER: _ClassVar[int]
    name: str
    backend: str
    place: str
    used_bytes: int
    capacity_bytes: int
    objects: int
    troubles: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, name: _Optional[str] = ..., backend: _Optional[str] = ..., place: _Optional[str] = ..., used_bytes: _Optional[int] = ..., capacity_bytes: _Optional[int] = ..., objects: _Optional[int] = ..., troubles: _Optional[_Iterable[str]] = ...) -> None: ...

class SessionStatus(_message.Message):
    __slots__ = ("session_id", "group", "model_id", "num_ops", "is_lost")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    MODEL_ID_FIELD_NUMBER: _ClassVar[int]
    NUM_OPS_FIELD_NUMBER: _ClassVar[int]
    IS_LOST_FIELD_NUMBER: _ClassVar[int]
    session_id: int
    group: str
    model_id: str
    num_ops: int
    is_lost: bool
    def __init__(self, session_id: _Optional[int] = ..., group: _Optional[str] = ..., model_id: _Optional[str] = ..., num_ops: _Optional[int] = ..., is_lost: bool = ...) -> None: ...

class RegionStatus(_message.Message):
    __slots__ = ("manager", "num_frames", "frame_bytes")
    MANAGER_FIELD_NUMBER: _ClassVar[int]
    NUM_FRAMES_FIELD_NUMBER: _ClassVar[int]
    FRAME_BYTES_FIELD_NUMBER: _ClassVar[int]
    manager: str
    num_frames: int
    frame_bytes: int
    def __init__(self, manager: _Optional[str] = ..., num_frames: _Optional[int] = ..., frame_bytes: _Optional[int] = ...) -> None: ...

class LookupPages(_message.Message):
    __slots__ = ("keys",)
    KEYS_FIELD_NUMBER: _ClassVar[int]
    keys: bytes
    def __init__(self, keys: _Optional[bytes] = ...) -> None: ...

class PagesHeld(_message.Message):
    __slots__ = ("held",)
    HELD_FIELD_NUMBER: _ClassVar[int]
    held: bytes
    def __init__(self, held: _Optional[bytes] = ...) -> None: ...

class StoreName(_message.Message):
    __slots__ = ("tenant", "namespace", "page_bytes", "memory_bytes")
    TENANT_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    PAGE_BYTES_FIELD_NUMBER: _ClassVar[int]
    MEMORY_BYTES_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    namespace: str
    page_bytes: int
    memory_bytes: int
    def __init__(self, tenant: _Optional[str] = ..., namespace: _Optional[str] = ..., page_bytes: _Optional[int] = ..., memory_bytes: _Optional[int] = ...) -> None: ...

class StoreKeys(_message.Message):
    __slots__ = ("store", "keys")
    STORE_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    store: StoreName
    keys: bytes
    def __init__(self, store: _Optional[_Union[StoreName, _Mapping]] = ..., keys: _Optional[bytes] = ...) -> None: ...

class PutPages(_message.Message):
    __slots__ = ("store", "keys", "pages", "first_page")
    STORE_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    PAGES_FIELD_NUMBER: _ClassVar[int]
    FIRST_PAGE_FIELD_NUMBER: _ClassVar[int]
    store: StoreName
    keys: bytes
    pages: bytes
    first_page: int
    def __init__(self, store: _Optional[_Union[StoreName, _Mapping]] = ..., keys: _Optional[bytes] = ..., pages: _Optional[bytes] = ..., first_page: _Optional[int] = ...) -> None: ...

class GetPages(_message.Message):
    __slots__ = ("store", "keys", "first_page")
    STORE_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    FIRST_PAGE_FIELD_NUMBER: _ClassVar[int]
    store: StoreName
    keys: bytes
    first_page: int
    def __init__(self, store: _Optional[_Union[StoreName, _Mapping]] = ..., keys: _Optional[bytes] = ..., first_page: _Optional[int] = ...) -> None: ...

class PagesGot(_message.Message):
    __slots__ = ("outcomes", "pages")
    OUTCOMES_FIELD_NUMBER: _ClassVar[int]
    PAGES_FIELD_NUMBER: _ClassVar[int]
    outcomes: bytes
    pages: bytes
    def __init__(self, outcomes: _Optional[bytes] = ..., pages: _Optional[bytes] = ...) -> None: ...
