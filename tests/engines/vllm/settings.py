"""How the vLLM of these tests is set up, in this process or in one of its own."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from engine_plugin.flags.vllm import transfer_config

TINY, OTHER_TINY = "tiny-llama-1", "tiny-llama-2"
BLOCK_SIZE = 32
TINY_VOCAB = 256
MIB = 2**20
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
    "OMP_NUM_THREADS": "1",
    "VLLM_CACHE_ROOT": str(Path(sys.prefix).parent / "cache"),
}
"""Nothing is asked of a network, two engines do not fight for the cores, and what vLLM has found out about a model's
class, in a process of its own that takes ten seconds, it finds out once for all of them."""


def plain(options: dict[str, object]) -> dict[str, Any]:
    """The connector's configuration as `cachesvc flags vllm` prints it."""
    return transfer_config(options)


def spied(options: dict[str, object]) -> dict[str, Any]:
    """The same, with the watched connector in its place."""
    return {**plain(options), "kv_connector": "SpyingConnector", "kv_connector_module_path": "tests.engines.vllm.spy"}
