from cachesvc.rpc import common_pb2 as _common_pb2
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class OpenStore(_message.Message):
    __slots__ = ("tenant", "namespace", "page_bytes", "memory_bytes", "previous_session_id", "previous_boot_id")
    TENANT_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    PAGE_BYTES_FIELD_NUMBER: _ClassVar[int]
    MEMORY_BYTES_FIELD_NUMBER: _ClassVar[int]
    PREVIOUS_SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    PREVIOUS_BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    namespace: str
    page_bytes: int
    memory_bytes: int
    previous_session_id: int
    previous_boot_id: bytes
    def __init__(self, tenant: _Optional[str] = ..., namespace: _Optional[str] = ..., page_bytes: _Optional[int] = ..., memory_bytes: _Optional[int] = ..., previous_session_id: _Optional[int] = ..., previous_boot_id: _Optional[bytes] = ...) -> None: ...

class StoreOpened(_message.Message):
    __slots__ = ("num_frames", "max_pages", "max_keys", "max_held_pages", "takes_used")
    NUM_FRAMES_FIELD_NUMBER: _ClassVar[int]
    MAX_PAGES_FIELD_NUMBER: _ClassVar[int]
    MAX_KEYS_FIELD_NUMBER: _ClassVar[int]
    MAX_HELD_PAGES_FIELD_NUMBER: _ClassVar[int]
    TAKES_USED_FIELD_NUMBER: _ClassVar[int]
    num_frames: int
    max_pages: int
    max_keys: int
    max_held_pages: int
    takes_used: bool
    def __init__(self, num_frames: _Optional[int] = ..., max_pages: _Optional[int] = ..., max_keys: _Optional[int] = ..., max_held_pages: _Optional[int] = ..., takes_used: bool = ...) -> None: ...

class ToStore(_message.Message):
    __slots__ = ("call", "reserve", "commit", "get", "release", "contains", "delete", "leave", "clear", "hold", "used")
    CALL_FIELD_NUMBER: _ClassVar[int]
    RESERVE_FIELD_NUMBER: _ClassVar[int]
    COMMIT_FIELD_NUMBER: _ClassVar[int]
    GET_FIELD_NUMBER: _ClassVar[int]
    RELEASE_FIELD_NUMBER: _ClassVar[int]
    CONTAINS_FIELD_NUMBER: _ClassVar[int]
    DELETE_FIELD_NUMBER: _ClassVar[int]
    LEAVE_FIELD_NUMBER: _ClassVar[int]
    CLEAR_FIELD_NUMBER: _ClassVar[int]
    HOLD_FIELD_NUMBER: _ClassVar[int]
    USED_FIELD_NUMBER: _ClassVar[int]
    call: int
    reserve: Reserve
    commit: Commit
    get: Get
    release: Release
    contains: Contains
    delete: Delete
    leave: Leave
    clear: Clear
    hold: Hold
    used: Used
    def __init__(self, call: _Optional[int] = ..., reserve: _Optional[_Union[Reserve, _Mapping]] = ..., commit: _Optional[_Union[Commit, _Mapping]] = ..., get: _Optional[_Union[Get, _Mapping]] = ..., release: _Optional[_Union[Release, _Mapping]] = ..., contains: _Optional[_Union[Contains, _Mapping]] = ..., delete: _Optional[_Union[Delete, _Mapping]] = ..., leave: _Optional[_Union[Leave, _Mapping]] = ..., clear: _Optional[_Union[Clear, _Mapping]] = ..., hold: _Optional[_Union[Hold, _Mapping]] = ..., used: _Optional[_Union[Used, _Mapping]] = ...) -> None: ...

class Reserve(_message.Message):
    __slots__ = ("keys", "depths", "prefix")
    KEYS_FIELD_NUMBER: _ClassVar[int]
    DEPTHS_FIELD_NUMBER: _ClassVar[int]
    PREFIX_FIELD_NUMBER: _ClassVar[int]
    keys: bytes
    depths: bytes
    prefix: bytes
    def __init__(self, keys: _Optional[bytes] = ..., depths: _Optional[bytes] = ..., prefix: _Optional[bytes] = ...) -> None: ...

class Commit(_message.Message):
    __slots__ = ("reserved", "written")
    RESERVED_FIELD_NUMBER: _ClassVar[int]
    WRITTEN_FIELD_NUMBER: _ClassVar[int]
    reserved: int
    written: bytes
    def __init__(self, reserved: _Optional[int] = ..., written: _Optional[bytes] = ...) -> None: ...

class Get(_message.Message):
    __slots__ = ("keys", "depths", "prefix")
    KEYS_FIELD_NUMBER: _ClassVar[int]
    DEPTHS_FIELD_NUMBER: _ClassVar[int]
    PREFIX_FIELD_NUMBER: _ClassVar[int]
    keys: bytes
    depths: bytes
    prefix: bytes
    def __init__(self, keys: _Optional[bytes] = ..., depths: _Optional[bytes] = ..., prefix: _Optional[bytes] = ...) -> None: ...

class Hold(_message.Message):
    __slots__ = ("keys",)
    KEYS_FIELD_NUMBER: _ClassVar[int]
    keys: bytes
    def __init__(self, keys: _Optional[bytes] = ...) -> None: ...

class Release(_message.Message):
    __slots__ = ("found",)
    FOUND_FIELD_NUMBER: _ClassVar[int]
    found: int
    def __init__(self, found: _Optional[int] = ...) -> None: ...

class Contains(_message.Message):
    __slots__ = ("keys",)
    KEYS_FIELD_NUMBER: _ClassVar[int]
    keys: bytes
    def __init__(self, keys: _Optional[bytes] = ...) -> None: ...

class Used(_message.Message):
    __slots__ = ("prefix",)
    PREFIX_FIELD_NUMBER: _ClassVar[int]
    prefix: bytes
    def __init__(self, prefix: _Optional[bytes] = ...) -> None: ...

class Delete(_message.Message):
    __slots__ = ("keys",)
    KEYS_FIELD_NUMBER: _ClassVar[int]
    keys: bytes
    def __init__(self, keys: _Optional[bytes] = ...) -> None: ...

class Clear(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Leave(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class FromStore(_message.Message):
    __slots__ = ("call", "reserved", "committed", "found", "held", "deleted", "error", "left", "cleared")
    CALL_FIELD_NUMBER: _ClassVar[int]
    RESERVED_FIELD_NUMBER: _ClassVar[int]
    COMMITTED_FIELD_NUMBER: _ClassVar[int]
    FOUND_FIELD_NUMBER: _ClassVar[int]
    HELD_FIELD_NUMBER: _ClassVar[int]
    DELETED_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    LEFT_FIELD_NUMBER: _ClassVar[int]
    CLEARED_FIELD_NUMBER: _ClassVar[int]
    call: int
    reserved: Reserved
    committed: Outcomes
    found: Found
    held: Outcomes
    deleted: Outcomes
    error: _common_pb2.Error
    left: Left
    cleared: Cleared
    def __init__(self, call: _Optional[int] = ..., reserved: _Optional[_Union[Reserved, _Mapping]] = ..., committed: _Optional[_Union[Outcomes, _Mapping]] = ..., found: _Optional[_Union[Found, _Mapping]] = ..., held: _Optional[_Union[Outcomes, _Mapping]] = ..., deleted: _Optional[_Union[Outcomes, _Mapping]] = ..., error: _Optional[_Union[_common_pb2.Error, _Mapping]] = ..., left: _Optional[_Union[Left, _Mapping]] = ..., cleared: _Optional[_Union[Cleared, _Mapping]] = ...) -> None: ...

class Reserved(_message.Message):
    __slots__ = ("outcomes", "frames")
    OUTCOMES_FIELD_NUMBER: _ClassVar[int]
    FRAMES_FIELD_NUMBER: _ClassVar[int]
    outcomes: bytes
    frames: bytes
    def __init__(self, outcomes: _Optional[bytes] = ..., frames: _Optional[bytes] = ...) -> None: ...

class Left(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Cleared(_message.Message):
    __slots__ = ("outcome", "num_pages")
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    NUM_PAGES_FIELD_NUMBER: _ClassVar[int]
    outcome: int
    num_pages: int
    def __init__(self, outcome: _Optional[int] = ..., num_pages: _Optional[int] = ...) -> None: ...

class Outcomes(_message.Message):
    __slots__ = ("outcomes",)
    OUTCOMES_FIELD_NUMBER: _ClassVar[int]
    outcomes: bytes
    def __init__(self, outcomes: _Optional[bytes] = ...) -> None: ...

class Found(_message.Message):
    __slots__ = ("outcomes", "frames", "generations")
    OUTCOMES_FIELD_NUMBER: _ClassVar[int]
    FRAMES_FIELD_NUMBER: _ClassVar[int]
    GENERATIONS_FIELD_NUMBER: _ClassVar[int]
    outcomes: bytes
    frames: bytes
    generations: bytes
    def __init__(self, outcomes: _Optional[bytes] = ..., frames: _Optional[bytes] = ..., generations: _Optional[bytes] = ...) -> None: ...
