"""cachesvc: a tiered KV-cache service for LLM serving.

`Node` is the whole service as a library. Names are imported when they are first used, so that importing the package
costs nothing and loads no native code.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cachesvc.client.base import AttachRefused as AttachRefused
    from cachesvc.client.base import AttachRequest as AttachRequest
    from cachesvc.client.base import CacheClient as CacheClient
    from cachesvc.client.inprocess import InProcessClient as InProcessClient
    from cachesvc.client.store import Store as Store
    from cachesvc.client.store import connect_store as connect_store
    from cachesvc.client.store import page_keys as page_keys
    from cachesvc.identity import Identity as Identity
    from cachesvc.node.node import Node as Node
    from cachesvc.node.parts import NodeOptions as NodeOptions
    from cachesvc.node.tiers import Tier as Tier
    from storage_backends.outcome import Outcome as Outcome

_HOMES = {
    "AttachRefused": "cachesvc.client.base",
    "AttachRequest": "cachesvc.client.base",
    "CacheClient": "cachesvc.client.base",
    "Identity": "cachesvc.identity",
    "InProcessClient": "cachesvc.client.inprocess",
    "Node": "cachesvc.node.node",
    "NodeOptions": "cachesvc.node.parts",
    "Outcome": "storage_backends.outcome",
    "Store": "cachesvc.client.store",
    "Tier": "cachesvc.node.tiers",
    "connect_store": "cachesvc.client.store",
    "page_keys": "cachesvc.client.store",
}
__all__ = sorted(_HOMES)  # noqa: PLE0605


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return __all__
