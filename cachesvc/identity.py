"""Who may share a page with whom: `Identity` (checked at attach) and the scope digest (varies by request).

Both digests hash typed, length-prefixed fields, so that no two different values have the same encoding.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, fields
from functools import lru_cache

import numpy as np
from cachekernels.pages import wrap_hashes
from numpy.typing import NDArray

DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1}
SUPPORTED_POOLS = frozenset({"kv"})
NO_SCOPE = bytes(32)
TAG_BYTES = 8
"""At the end of a key of node-managed memory."""

Value = str | bytes | int | tuple["Value", ...]


def encode_value(value: Value) -> bytes:
    """`value` as type tag, u64 little-endian length (items for a tuple), content. Injective over all of `Value`."""
    match value:
        case str():
            tag, content = b"s", value.encode()
        case bytes():
            tag, content = b"b", value
        case int():
            tag, content = b"i", str(int(value)).encode()
        case tuple():
            return b"t" + len(value).to_bytes(8, "little") + b"".join(encode_value(item) for item in value)
    return tag + len(content).to_bytes(8, "little") + content


@dataclass(frozen=True, kw_only=True)
class Identity:
    """Everything that must be equal before two engines may share a page (the *namespace*).

    `weights_digest` is the weights' revision, or a digest over the configuration and a sample of every tensor.
    `config_digest` covers what changes KV without changing shapes: rope overrides, quantisation, KV scales.
    `rank_shape` is the shape only, such as (("tp", 2),); the rank itself is part of the object id.
    `engine_layout` is the engine's own fingerprint of how it lays out KV. Raises ValueError for impossible geometry.
    """

    model_id: str
    weights_digest: str
    config_digest: str
    dtype: str
    page_size: int
    num_layers: int
    num_kv_heads: int
    head_dim: int
    kv_layout: str = "page_first"
    kv_layout_version: int = 1
    pools: tuple[str, ...] = ("kv",)
    rank_shape: tuple[tuple[str, int], ...] = ()
    engine_layout: str = ""
    key_scheme: str = "cs1"

    def __post_init__(self) -> None:
        for name in ("page_size", "num_layers", "num_kv_heads", "head_dim"):
            value = getattr(self, name)
            if value < 1:
                raise ValueError(f"identity: {name} is {value}, expected at least 1")
        if self.dtype not in DTYPE_BYTES:
            raise ValueError(f"identity: dtype is {self.dtype!r}, expected one of {', '.join(sorted(DTYPE_BYTES))}")

    def namespace(self) -> bytes:
        """The 32-byte digest that starts every page key (`engine_ns`)."""
        named = tuple((field.name, getattr(self, field.name)) for field in fields(self))
        return hashlib.sha256(b"cs1/namespace" + encode_value(named)).digest()

    def page_bytes(self) -> int:
        """Bytes of one page on one rank: K and V of `page_size` tokens over all layers."""
        return 2 * self.num_layers * self.page_size * self.num_kv_heads * self.head_dim * DTYPE_BYTES[self.dtype]

    def differences(self, other: Identity) -> list[str]:
        """One line per field in which `other` differs: name, the value here, the value there."""
        pairs = [(field.name, getattr(self, field.name), getattr(other, field.name)) for field in fields(self)]
        return [f"{name}: {here!r} here, {there!r} requested" for name, here, there in pairs if here != there]

    def unsupported_pools(self) -> list[str]:
        """Pools this version cannot keep; an engine that has one attaches with the cache off."""
        return sorted(set(self.pools) - SUPPORTED_POOLS)


def scope_digest(*, tenant: str = "", adapter_digest: bytes = b"", salt: str = "") -> bytes:
    """32 bytes for the part of the namespace that varies by request; `NO_SCOPE` where nothing is set.

    `adapter_digest` is a digest of the adapter's *content*: names and load order differ between processes.
    """
    if not tenant and not adapter_digest and not salt:
        return NO_SCOPE
    return hashlib.sha256(b"cs1/scope" + encode_value((tenant, adapter_digest, salt))).digest()


def store_keys(tenant: str, namespace: str, page_bytes: int, keys: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """The keys, uint8[n, 32], under which node-managed memory keeps what its clients put under `keys`, uint8[n, 32].

    The node wraps them itself, so that no client can name a page of another tenant, whatever keys it sends. Each ends
    with the tag of its namespace, by which all of them can be found in memory and on any medium (docs/adr/0040).
    """
    wrapped = wrap_hashes(*store_wrapping(tenant, namespace, page_bytes), keys)
    wrapped[:, -TAG_BYTES:] = store_tag(tenant, namespace, page_bytes)
    return wrapped


@lru_cache(maxsize=256)
def store_wrapping(tenant: str, namespace: str, page_bytes: int) -> tuple[str, bytes, bytes]:
    """Scheme, namespace and scope with which keys of node-managed memory are wrapped (`cachekernels.pages`)."""
    digest = hashlib.sha256(b"cs1/store" + encode_value((namespace, page_bytes))).digest()
    return "sha256", digest, scope_digest(tenant=tenant)


@lru_cache(maxsize=256)
def store_tag(tenant: str, namespace: str, page_bytes: int) -> NDArray[np.uint8]:
    """uint8 [8], read-only, with which the node's keys of these pages end. To find a tenant or namespace that has the
    tag of another takes 2**64 attempts."""
    digest = hashlib.sha256(b"cs1/store-tag" + encode_value((tenant, namespace, page_bytes))).digest()
    return np.frombuffer(digest[:TAG_BYTES], np.uint8)


def is_tagged(keys: NDArray[np.uint8], tag: NDArray[np.uint8]) -> NDArray[np.bool_]:
    """bool [n]: which of `keys` uint8 [n, 32] end with `tag`."""
    equal: NDArray[np.bool_] = (keys[:, -TAG_BYTES:] == tag).all(axis=1)
    return equal
