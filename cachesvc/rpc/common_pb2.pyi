from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Versions(_message.Message):
    __slots__ = ("protocol", "region", "software")
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    REGION_FIELD_NUMBER: _ClassVar[int]
    SOFTWARE_FIELD_NUMBER: _ClassVar[int]
    protocol: int
    region: int
    software: str
    def __init__(self, protocol: _Optional[int] = ..., region: _Optional[int] = ..., software: _Optional[str] = ...) -> None: ...

class Identity(_message.Message):
    __slots__ = ("model_id", "weights_digest", "config_digest", "dtype", "page_size", "num_layers", "num_kv_heads", "head_dim", "kv_layout", "kv_layout_version", "pools", "rank_shape", "engine_layout", "key_scheme")
    MODEL_ID_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_DIGEST_FIELD_NUMBER: _ClassVar[int]
    CONFIG_DIGEST_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    NUM_LAYERS_FIELD_NUMBER: _ClassVar[int]
    NUM_KV_HEADS_FIELD_NUMBER: _ClassVar[int]
    HEAD_DIM_FIELD_NUMBER: _ClassVar[int]
    KV_LAYOUT_FIELD_NUMBER: _ClassVar[int]
    KV_LAYOUT_VERSION_FIELD_NUMBER: _ClassVar[int]
    POOLS_FIELD_NUMBER: _ClassVar[int]
    RANK_SHAPE_FIELD_NUMBER: _ClassVar[int]
    ENGINE_LAYOUT_FIELD_NUMBER: _ClassVar[int]
    KEY_SCHEME_FIELD_NUMBER: _ClassVar[int]
    model_id: str
    weights_digest: str
    config_digest: str
    dtype: str
    page_size: int
    num_layers: int
    num_kv_heads: int
    head_dim: int
    kv_layout: str
    kv_layout_version: int
    pools: _containers.RepeatedScalarFieldContainer[str]
    rank_shape: _containers.RepeatedCompositeFieldContainer[RankAxis]
    engine_layout: str
    key_scheme: str
    def __init__(self, model_id: _Optional[str] = ..., weights_digest: _Optional[str] = ..., config_digest: _Optional[str] = ..., dtype: _Optional[str] = ..., page_size: _Optional[int] = ..., num_layers: _Optional[int] = ..., num_kv_heads: _Optional[int] = ..., head_dim: _Optional[int] = ..., kv_layout: _Optional[str] = ..., kv_layout_version: _Optional[int] = ..., pools: _Optional[_Iterable[str]] = ..., rank_shape: _Optional[_Iterable[_Union[RankAxis, _Mapping]]] = ..., engine_layout: _Optional[str] = ..., key_scheme: _Optional[str] = ...) -> None: ...

class RankAxis(_message.Message):
    __slots__ = ("name", "size")
    NAME_FIELD_NUMBER: _ClassVar[int]
    SIZE_FIELD_NUMBER: _ClassVar[int]
    name: str
    size: int
    def __init__(self, name: _Optional[str] = ..., size: _Optional[int] = ...) -> None: ...

class Limits(_message.Message):
    __slots__ = ("max_message_bytes", "max_ops", "max_waiting_store_pages", "slice_keys")
    MAX_MESSAGE_BYTES_FIELD_NUMBER: _ClassVar[int]
    MAX_OPS_FIELD_NUMBER: _ClassVar[int]
    MAX_WAITING_STORE_PAGES_FIELD_NUMBER: _ClassVar[int]
    SLICE_KEYS_FIELD_NUMBER: _ClassVar[int]
    max_message_bytes: int
    max_ops: int
    max_waiting_store_pages: int
    slice_keys: int
    def __init__(self, max_message_bytes: _Optional[int] = ..., max_ops: _Optional[int] = ..., max_waiting_store_pages: _Optional[int] = ..., slice_keys: _Optional[int] = ...) -> None: ...

class Tier(_message.Message):
    __slots__ = ("name",)
    NAME_FIELD_NUMBER: _ClassVar[int]
    name: str
    def __init__(self, name: _Optional[str] = ...) -> None: ...

class Refused(_message.Message):
    __slots__ = ("result", "message", "versions")
    RESULT_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    VERSIONS_FIELD_NUMBER: _ClassVar[int]
    result: str
    message: str
    versions: Versions
    def __init__(self, result: _Optional[str] = ..., message: _Optional[str] = ..., versions: _Optional[_Union[Versions, _Mapping]] = ...) -> None: ...

class Error(_message.Message):
    __slots__ = ("op", "reason", "message")
    OP_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    op: int
    reason: str
    message: str
    def __init__(self, op: _Optional[int] = ..., reason: _Optional[str] = ..., message: _Optional[str] = ...) -> None: ...

class Counters(_message.Message):
    __slots__ = ("values",)
    class ValuesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    VALUES_FIELD_NUMBER: _ClassVar[int]
    values: _containers.ScalarMap[str, float]
    def __init__(self, values: _Optional[_Mapping[str, float]] = ...) -> None: ...
