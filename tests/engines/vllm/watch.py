"""The other end of spy.py: what the engines' connectors have seen, and whether it is as it must be."""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HARMS = ("scale", "swap", "zero")


@dataclass
class Seen:
    """By label and block hash: the checksums of what was stored; and every load as (label, hash, checksum). `harmed`:
    those that were spoiled on purpose."""

    stored: dict[tuple[str, str], set[str]] = field(default_factory=lambda: defaultdict(set))
    loaded: list[tuple[str, str, str]] = field(default_factory=list)
    harmed: list[tuple[str, str, str]] = field(default_factory=list)
    foreign: list[dict[str, str]] = field(default_factory=list)

    def wrong_among(self, loads: list[tuple[str, str, str]]) -> list[tuple[str, str, str]]:
        """Loads of bytes that nobody stored for these tokens."""
        return [one for one in loads if one[2] not in self.stored.get(one[:2], ())]


class Watch:
    """A folder that engines write to. One for all engines that share a node, because they load each other's pages."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def environment(self, label: str) -> dict[str, str]:
        """For an engine. `label` names what it must have in common with another one to share pages."""
        return {"CACHESVC_TEST_SPY": str(self.folder), "CACHESVC_TEST_LABEL": label}

    def seen(self) -> Seen:
        """Everything so far."""
        seen = Seen()
        for path in sorted(self.folder.glob("*.jsonl"), key=lambda path: path.stat().st_mtime_ns):
            for line in path.read_text().splitlines():
                self._take(seen, json.loads(line))
        return seen

    def check(self, *, at_least_loaded: int = 0) -> Seen:
        """Every loaded block is what was stored for its tokens; our packages came from the wheel."""
        seen = self.seen()
        assert not any(seen.foreign), seen.foreign
        assert len(seen.loaded) >= at_least_loaded, f"{len(seen.loaded)} blocks were loaded"
        wrong = seen.wrong_among(seen.loaded)
        assert not wrong, f"{len(wrong)} of {len(seen.loaded)} loaded blocks are not what was stored"
        return seen

    def harm(self, kind: str | None) -> None:
        """From now on loaded blocks are spoiled: one of HARMS, or None."""
        path = self.folder / "harm"
        path.unlink(missing_ok=True)
        if kind is not None:
            path.write_text(kind)

    @staticmethod
    def _take(seen: Seen, record: dict[str, Any]) -> None:
        if record["what"] == "packages":
            seen.foreign.append(record["foreign"])
        elif record["what"] == "stored":
            seen.stored[record["label"], record["hash"]].add(record["digest"])
        else:
            loads = seen.harmed if record["harm"] else seen.loaded
            loads.append((record["label"], record["hash"], record["digest"]))
