"""docs/architecture.md names files and symbols; each must exist."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "architecture.md").read_text()
REFERENCES = sorted(set(re.findall(r"`([\w/]+\.py)(?::([\w.]+))?`", PAGE)))


def symbols(path: Path) -> set[str]:
    """Top-level names of a module, and `Class.member`, inherited ones of classes in this tree included."""
    found: set[str] = set()
    bases: dict[str, list[str]] = {}
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        if isinstance(node, ast.ClassDef):
            bases[node.name] = [base.id for base in node.bases if isinstance(base, ast.Name)]
            found |= {f"{node.name}.{member.name}" for member in node.body if isinstance(member, ast.FunctionDef)}
    for name, parents in bases.items():
        for parent in parents:
            found |= {f"{name}.{inherited}" for inherited in _members(path, parent)}
    return found


def _members(path: Path, name: str) -> set[str]:
    for candidate in path.parent.glob("*.py"):
        for node in ast.parse(candidate.read_text()).body:
            if isinstance(node, ast.ClassDef) and node.name == name:
                return {member.name for member in node.body if isinstance(member, ast.FunctionDef)}
    return set()


def test_the_page_names_symbols() -> None:
    assert len(REFERENCES) > 20


@pytest.mark.parametrize(("file", "symbol"), REFERENCES)
def test_named_symbol_exists(file: str, symbol: str) -> None:
    path = ROOT / file
    assert path.is_file(), f"docs/architecture.md names {file}, which does not exist"
    if symbol:
        assert symbol in symbols(path), f"docs/architecture.md names {file}:{symbol}, which does not exist"


def test_a_missing_symbol_would_be_seen() -> None:
    assert "RadixTree.match" in symbols(ROOT / "kernels/cachekernels/tree.py")
    assert "RadixTree.no_such" not in symbols(ROOT / "kernels/cachekernels/tree.py")
