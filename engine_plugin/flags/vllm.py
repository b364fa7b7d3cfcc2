"""`vllm serve` with the connector of this package. The options are checked by the connector's own configuration."""

from __future__ import annotations

import json

from engine_plugin.flags.launch import PLACEHOLDER, Launch, Wish
from engine_plugin.vllm.config import parse_config

CONNECTOR, MODULE = "CachesvcConnector", "engine_plugin.vllm.connector"
FAILURE_POLICY = "recompute"
"""vLLM's default, `fail`, answers a request with an error when a page of its prefix could not be loaded."""

LATE_END = ("--shutdown-timeout", "10")
"""By default vLLM, told to end, kills its processes at once: a private node among them, which still writes."""


def launch(wish: Wish) -> Launch:
    """The launch line. ConfigError (ValueError)."""
    options = wish.node_options()
    if wish.host_gib is not None:
        options["host_size_gib"] = wish.host_gib
    if wish.group is not None:
        options["group"] = wish.group
    parse_config(options)
    connector = ("--kv-transfer-config", json.dumps(transfer_config(options)))
    return Launch(
        engine="vllm",
        argv=("vllm", "serve", wish.model or PLACEHOLDER, *connector, *(() if wish.storage is None else LATE_END)),
        options=options,
        notes=_notes(wish),
    )


def transfer_config(options: dict[str, object]) -> dict[str, object]:
    """The value of --kv-transfer-config."""
    return {
        "kv_connector": CONNECTOR,
        "kv_connector_module_path": MODULE,
        "kv_role": "kv_both",
        "kv_load_failure_policy": FAILURE_POLICY,
        "kv_connector_extra_config": options,
    }


def _notes(wish: Wish) -> tuple[str, ...]:
    notes = wish.model_notes()
    if wish.address == "auto":
        notes.append("Uses the daemon of this machine if it answers (cachesvc up), else a node of the engine's own.")
    if wish.address == "private" and wish.storage is None:
        notes.append("Without storage, pages live in host memory and end with the engine; --storage file keeps them.")
    return tuple(notes)
