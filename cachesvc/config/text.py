"""Writes the configuration as TOML: the effective one, and an example that is made from the model."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pydantic.fields import FieldInfo

from cachesvc.config.model import Config, Section, TierConfig
from storage_backends.secrets import without_secrets

EXAMPLE = "  # an example"
"""Behind a value that is no default."""


def effective(config: Config) -> dict[str, Any]:
    """Every value in force, as JSON would have it; secrets in options and passwords in URLs are hidden."""
    values: dict[str, Any] = without_secrets(config.model_dump(mode="json"))
    return values


def as_toml(config: Config) -> str:
    """The effective configuration as a file that would lead to it, apart from hidden secrets."""
    values = effective(config)
    tables = [(name, table) for name, table in values.items() if isinstance(table, dict)]
    lines = [line for name, table in tables for line in (f"[{name}]", *_pairs(table), "")]
    for tier in values["tier"]:
        options = tier.pop("options")
        lines += ["[[tier]]", *_pairs(tier), *(["[tier.options]", *_pairs(options)] if options else []), ""]
    return "\n".join(["tier = []", "", *lines] if not values["tier"] else lines)


def example() -> str:
    """A file with every key, its meaning and its default, each commented out: as it stands it changes nothing."""
    lines = [
        "# Configuration of `cachesvc up`: every key, with its default. One that has none has an example of a value;",
        "# what holds while it is unset stands above it. Take away the # to set a key.",
        "",
    ]
    for name, field in Config.model_fields.items():
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, Section):
            lines += [f"# {(kind.__doc__ or '').strip()}", f"[{name}]", *_commented(kind.model_fields), ""]
    lines += [f"# {(TierConfig.__doc__ or '').strip()} Without any, pages rest in files below the user's cache folder."]
    lines += ["# [[tier]]", *_commented(TierConfig.model_fields, {"backend": "file"}, skip=("options",))]
    lines += ["# [tier.options]", f"# {_pair('capacity_bytes', '10 GiB')}{EXAMPLE}", ""]
    return "\n".join(lines)


def _commented(
    fields: Mapping[str, FieldInfo], given: Mapping[str, object] | None = None, skip: tuple[str, ...] = ()
) -> Iterator[str]:
    for name, field in fields.items():
        if name in skip:
            continue
        yield f"# {field.description}"
        value = (given or {}).get(name, field.get_default())
        yield (
            f"# {_pair(name, value)}" if value is not None else f"# {_pair(name, (field.examples or [''])[0])}{EXAMPLE}"
        )


def _pairs(values: Mapping[str, object]) -> list[str]:
    return [_pair(name, value) for name, value in values.items() if value is not None]


def _pair(name: str, value: object) -> str:
    """`name = value`. JSON's strings, numbers, booleans and lists are TOML as well."""
    key = name if re.fullmatch(r"[A-Za-z0-9_-]+", name) else json.dumps(name)
    return f"{key} = {_value(value)}"


def _value(value: object) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(_pair(name, inner) for name, inner in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_value, value)) + "]"
    return json.dumps(str(value) if isinstance(value, Path) else value)
