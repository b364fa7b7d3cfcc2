"""Finding NIXL, which comes in one package per version of CUDA.

Its front package `nixl` would choose one, and imports torch to do so: two seconds, in a daemon that has no use for it.
"""

from __future__ import annotations

import importlib
from typing import Any, Final

BUILDS: Final = ("nixl_cu12", "nixl_cu13", "nixl_rocm")
"""The first one has the OBJ plug-in."""


def load_nixl() -> Any:
    """The Python API of the first build that is installed. Raises ImportError, named after the first, where none is."""
    for build in BUILDS:
        try:
            return importlib.import_module(f"{build}._api")
        except ModuleNotFoundError as error:
            if error.name != build:
                raise
    raise ImportError(f"none of {', '.join(BUILDS)} is installed", name=BUILDS[0])
