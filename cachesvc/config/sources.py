"""Reads the configuration: flags over environment over file over defaults."""

from __future__ import annotations

import argparse
import os
import re
import tomllib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails
from pydantic_settings import (
    BaseSettings,
    CliSettingsSource,
    PydanticBaseSettingsSource,
    SettingsError,
    TomlConfigSettingsSource,
)

from cachesvc.config.model import ENV_PREFIX, Config, ConfigError, Section, TierConfig
from storage_backends.options import hint
from storage_backends.secrets import without_secrets

CONFIG_VARIABLE = f"{ENV_PREFIX}CONFIG"
EPILOG = (
    "SIZE: bytes, or a number with a unit: '10 GiB'. Every flag is a key of the file too, and an environment variable: "
    "docs/daemon.md, or `cachesvc config example`."
)
NO_DEFAULT = re.compile(r" \(default(: None| factory: .*)\)$")
"""Behind the help of a flag whose default is decided later; its description says how."""
SHORTCUTS = {"channel.socket": "socket"}
TIER_HEADER = "[[tier]]"
OPTIONS_HEADER = "[tier.options]"
SECTIONS = tuple(
    name
    for name, field in Config.model_fields.items()
    if isinstance(field.annotation, type) and issubclass(field.annotation, Section)
)
"""Tables of the file. As flags, which take one as JSON, they are not told of."""


def load_config(prog: str, argv: Sequence[str], about: str = "") -> Config:
    """The effective configuration for these flags. `--help` prints `about` and the flags and raises SystemExit;
    ConfigError."""
    parser = _FlagParser(prog=prog, description=about, epilog=EPILOG, allow_abbrev=False)
    parser.add_argument(
        "--config", metavar="FILE", default=os.environ.get(CONFIG_VARIABLE), help=f"TOML file (or ${CONFIG_VARIABLE})"
    )
    known, _ = parser.without_help().parse_known_args(argv)
    path = None if known.config is None else Path(known.config)
    _check_environment(os.environ)
    file_values = {} if path is None else _read_file(path)

    class Loaded(Config):
        @classmethod
        def settings_customise_sources(
            cls,
            settings_cls: type[BaseSettings],
            init_settings: PydanticBaseSettingsSource,
            env_settings: PydanticBaseSettingsSource,
            dotenv_settings: PydanticBaseSettingsSource,
            file_secret_settings: PydanticBaseSettingsSource,
        ) -> tuple[PydanticBaseSettingsSource, ...]:
            flags: CliSettingsSource[argparse.ArgumentParser] = CliSettingsSource(
                settings_cls,
                cli_prog_name=prog,
                cli_parse_args=list(argv),
                cli_kebab_case=True,
                cli_hide_none_type=True,
                cli_avoid_json=True,
                cli_shortcuts=SHORTCUTS,
                root_parser=parser,
                parse_args_method=_FlagParser.parse_args,
                add_argument_method=_add_flag,
            )
            return flags, env_settings, TomlConfigSettingsSource(settings_cls, path)

    try:
        loaded = Loaded()
    except ValidationError as error:
        raise ConfigError(_explain(error.errors()[0], path, file_values)) from None
    except SettingsError as error:
        raise ConfigError(f"{error}: {error.__cause__}") from None
    return Config.model_construct(**{name: getattr(loaded, name) for name in Config.model_fields})


def _add_flag(parser: argparse.ArgumentParser, *names: str, **how: Any) -> None:
    """`add_argument`, in words that mean something to whoever asked for help."""
    if names[0].endswith("-bytes"):
        how["metavar"] = "SIZE"
    parser.add_argument(*names, **{**how, "help": NO_DEFAULT.sub("", how.get("help") or "")})


class _FlagParser(argparse.ArgumentParser):
    """argparse, except that wrong flags are a ConfigError, and a misspelt one is answered with the nearest."""

    def without_help(self) -> argparse.ArgumentParser:
        """For a first look at `--config`, before the other flags are known."""
        first = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
        first.add_argument("--config", default=self.get_default("config"))
        return first

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        parsed, unknown = self.parse_known_args(args, namespace)
        if unknown:
            name = unknown[0].split("=")[0]
            valid = (flag for flag in self._option_string_actions if flag.removeprefix("--") not in SECTIONS)
            raise ConfigError(f"unknown flag {name}; {hint(name, valid)}")
        return parsed

    def error(self, message: str) -> NoReturn:
        raise ConfigError(message)


def environment_names() -> list[str]:
    """Every variable that is read."""
    names = [CONFIG_VARIABLE]
    for name, field in Config.model_fields.items():
        kind = field.annotation
        keys: Iterable[str] = [name]
        if isinstance(kind, type) and issubclass(kind, Section):
            keys = [f"{name}_{key}" for key in kind.model_fields]
        names += [f"{ENV_PREFIX}{key}".upper() for key in keys]
    return names


def _check_environment(environ: Iterable[str]) -> None:
    valid = environment_names()
    for name in environ:
        if name.startswith(ENV_PREFIX) and name not in valid:
            raise ConfigError(f"environment variable {name} is none of ours; {hint(name, valid)}")


def _read_file(path: Path) -> dict[str, Any]:
    """What the file holds, for messages. ConfigError: not there, or not TOML."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"--config: cannot read {path}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"--config: {path} is not TOML: {error}") from error


def _explain(error: ErrorDetails, path: Path | None, file_values: dict[str, Any]) -> str:
    """One line: the key, what was given, what is valid."""
    place = error["loc"]
    key = _dotted(place)
    source = f" (in {path})" if path is not None and _holds(file_values, place) else ""
    if error["type"] == "extra_forbidden":
        return f"unknown key {key}{source}; {_hint(place)}"
    if error["type"] == "list_type" and place == ("tier",):
        return f"tier: expected a list of tiers ({TIER_HEADER} in a file), got {_shown(error)!r}{source}"
    said = error["msg"].removeprefix("Value error, ")
    message = re.sub(rf"^(value|{re.escape(str(place[-1]))})=", "", said) if place else said  # the key stands before it
    given = "" if error["type"] == "value_error" else f", got {_shown(error)!r}"
    return f"{key}: {message}{given}{source}"


def _shown(error: ErrorDetails) -> object:
    """What was given. It may be the whole table that something is missing in."""
    place = error["loc"]
    return without_secrets(error["input"], str(place[-1]) if place else "")


def _dotted(place: tuple[int | str, ...]) -> str:
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in place).lstrip(".")


def _holds(values: Any, place: tuple[int | str, ...]) -> bool:
    for part in place:
        try:
            values = values[part]
        except (KeyError, IndexError, TypeError):
            return False
    return True


def _hint(place: tuple[int | str, ...]) -> str:
    """What may be meant by an unknown name: one of its place, else one that belongs elsewhere."""
    name = str(place[-1])
    homes = [key for key in Config.model_fields if name in _siblings((key, name))]
    if len(homes) == 1:
        return f"it belongs below {TIER_HEADER if homes == ['tier'] else f'[{homes[0]}]'}"
    meant = hint(name, _siblings(place))
    return f"{meant}; options of its backend belong below {OPTIONS_HEADER}" if _is_of_a_tier(place) else meant


def _is_of_a_tier(place: tuple[int | str, ...]) -> bool:
    return len(place) > 1 and place[0] == "tier"


def _siblings(place: tuple[int | str, ...]) -> list[str]:
    """The valid names where an unknown one was found."""
    section: type[BaseModel] = Config
    if len(place) > 1:
        kind = Config.model_fields[str(place[0])].annotation
        section = kind if isinstance(kind, type) and issubclass(kind, Section) else TierConfig
    return list(section.model_fields)
