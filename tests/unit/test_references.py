"""What sources and pages refer to is in this tree."""

from __future__ import annotations

import re
from pathlib import Path

from cachesvc.outcomes import PrefetchEnd

ROOT = Path(__file__).parents[2]
SOURCES = ("kernels", "storage_backends", "cachesvc", "engine_plugin", "bench", "docs", "proto", "examples")
ENDINGS = {".py", ".cpp", ".hpp", ".proto", ".md"}


def texts() -> list[tuple[Path, str]]:
    files = [path for folder in SOURCES for path in (ROOT / folder).rglob("*") if path.suffix in ENDINGS]
    return [(path, path.read_text(encoding="utf-8")) for path in (*files, ROOT / "README.md", ROOT / "CONTRIBUTING.md")]


def test_no_section_of_a_document_that_is_not_here_is_cited() -> None:
    cited = [str(path) for path, text in texts() if re.search(r"\b(DESIGN,? )?section \d|§ ?\d", text)]
    assert cited == []


def test_every_page_that_is_named_exists() -> None:
    """Names in capitals; others may be somebody else's specification, and links are looked at below."""
    pages = {path.name for path, _ in texts() if path.suffix == ".md"}
    named = [(str(path), name) for path, text in texts() for name in re.findall(r"\b[A-Z]{2,}\.md\b", text)]
    assert [pair for pair in named if pair[1] not in pages] == []


def test_ends_of_prefetches_that_pages_name_are_counted() -> None:
    named = {end for _, text in texts() for end in re.findall(r'prefetches_total\{end="(\w+)"\}', text)}
    assert named and named <= set(PrefetchEnd)


def test_links_between_pages_lead_somewhere() -> None:
    for path, text in texts():
        if path.suffix == ".md":
            for target in re.findall(r"\]\(([^)#:]+)\)", text):
                assert (path.parent / target).exists(), f"{path.name} links to {target}"
