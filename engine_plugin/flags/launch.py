"""What every engine's launch line is made from, and what it consists of."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import TypeAlias

from engine_plugin.hicache.config import AUTO, PRIVATE

PLACEHOLDER = "MODEL"
"""Stands where the model's name belongs when none was given."""


@dataclass(frozen=True, slots=True)
class Wish:
    """What the operator said. None: nothing, the plug-in's own default holds."""

    model: str | None = None
    address: str = "auto"
    storage: str | None = None
    storage_config: Mapping[str, object] = field(default_factory=dict)
    host_gib: float | None = None
    group: str | None = None

    def node_options(self) -> dict[str, object]:
        """Which node, and its storage, as every plug-in calls them. ValueError: storage that a daemon would refuse."""
        if self.storage is not None and self.address != PRIVATE:
            when = " as soon as a daemon answers" if self.address == AUTO else ""
            raise ValueError(
                f"--storage {self.storage} is for a node of the engine's own, and with --address {self.address} an "
                f"error{when}, because a daemon has storage of its own: say --address private, or give the tier to the "
                "daemon (cachesvc up --config FILE, sections [[tier]])"
            )
        options: dict[str, object] = {"address": self.address}
        if self.storage is not None:
            options["storage_backend"] = self.storage
        if self.storage_config:
            options["storage_config"] = dict(self.storage_config)
        return options

    def model_notes(self) -> list[str]:
        """For a person, where no model was named."""
        return [] if self.model else [f"{PLACEHOLDER} stands for the model; --model NAME puts it there."]


@dataclass(frozen=True, slots=True)
class Launch:
    """A launch line. `argv` begins with the engine's command; `environment` is what must be set beside what is;
    `options` are the plug-in's own, as they stand in the line; `notes`, a sentence each, are for a person."""

    engine: str
    argv: tuple[str, ...]
    options: Mapping[str, object]
    environment: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    def as_dict(self) -> dict[str, object]:
        """For JSON."""
        return asdict(self)

    def as_text(self) -> str:
        """For a shell: notes as comments, then one line per flag."""
        comments = [f"# {note}\n" for note in self.notes]
        words = [f"{name}={shlex.quote(value)}" for name, value in self.environment.items()]
        words += [shlex.quote(word) for word in self.argv]
        return "".join(comments) + _folded(words) + "\n"


Build: TypeAlias = Callable[[Wish], Launch]
"""What a module of an engine offers as `launch`. Raises ValueError with one line for the operator."""


def _folded(words: list[str]) -> str:
    """One line of a shell, broken before each flag."""
    text = words[0]
    for word in words[1:]:
        text += (" \\\n  " if word.startswith("--") else " ") + word
    return text
