"""Whose code answers for our packages: the installed wheel's, or the tree's?"""

from __future__ import annotations

import importlib
import json
import sys
from importlib.metadata import distribution
from pathlib import Path

PACKAGES = ("cachekernels", "storage_backends", "cachesvc", "engine_plugin")


def foreign_packages(prefix: str = sys.prefix) -> dict[str, str]:
    """Of our packages, those that this process does not import from below `prefix`, with where they come from."""
    found = {name: str(importlib.import_module(name).__file__) for name in PACKAGES}
    return {name: path for name, path in found.items() if not Path(path).is_relative_to(prefix)}


def is_editable() -> bool:
    """Whether the installed distribution points back into a tree."""
    text = distribution("cachesvc").read_text("direct_url.json") or "{}"
    return bool(json.loads(text).get("dir_info", {}).get("editable", False))
