"""`sglang serve` with HiCache on and this package as its storage. The options are checked by the storage's own
configuration."""

from __future__ import annotations

import json

import numpy as np

from engine_plugin.flags.launch import PLACEHOLDER, Launch, Wish
from engine_plugin.sglang.config import parse_config

STORAGE, MODULE = "CachesvcStorage", "engine_plugin.sglang.storage"
LAYOUT = "page_first"
"""A page is two pieces of memory in it, one for K and one for V: the fewest that a layout offers."""
LOADED_AS = {
    "backend_name": "cachesvc",
    "module_path": MODULE,
    "class_name": STORAGE,
    "interface_v1": 1,
    "hicache_storage_pass_prefix_keys": True,
}
"""How SGLang loads a storage that is not its own. interface_v1: pages go straight from and to its host pool.
hicache_storage_pass_prefix_keys: what SGLang has in its own memory counts as used in the node's, too."""


def launch(wish: Wish) -> Launch:
    """The launch line. ConfigError (ValueError)."""
    options = wish.node_options()
    if wish.host_gib is not None:
        options["memory_gib"] = wish.host_gib
    if wish.group is not None:
        raise ValueError(
            "group: SGLang keeps its host memory itself; pages in the node belong to a tenant, not a group"
        )
    config = parse_config(options)
    return Launch(
        engine="sglang",
        argv=(
            *("sglang", "serve", "--model-path", wish.model or PLACEHOLDER),
            "--enable-hierarchical-cache",
            *("--hicache-mem-layout", LAYOUT),
            *("--hicache-storage-backend", "dynamic"),
            *("--hicache-storage-backend-extra-config", json.dumps({**LOADED_AS, **options})),
        ),
        options=options,
        notes=_notes(wish, config.memory_gib),
    )


def _notes(wish: Wish, memory_gib: float) -> tuple[str, ...]:
    notes = wish.model_notes()
    if wish.address == "auto":
        notes.append("Uses the daemon of this machine if it answers, else a node of each rank's own.")
    if wish.address != "private":
        asked = np.format_float_positional(memory_gib, trim="-")
        notes.append(
            f"A daemon lends SGLang memory_gib={asked} (--host-memory) if it was given as much: cachesvc up "
            f"--memory.managed-bytes '{asked} GiB'."
        )
    if wish.address == "private" and wish.storage is None:
        notes.append(
            "Without storage, pages live in the node's memory and end with the engine; --storage file keeps them."
        )
    return tuple(notes)
