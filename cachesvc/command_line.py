"""What all command lines here have in common: a wrong flag is one line on stderr, and values are checked by name."""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Callable, Sequence
from typing import NoReturn

NEAR = 0.7
"""How alike a flag must be to be suggested: `difflib`'s ratio. Below, a suggestion misleads more than it helps."""
MOST = 2**63 - 1
_SHOWN = 40


class Parser(argparse.ArgumentParser):
    """argparse, except that what is wrong is said in one line, and a misspelt flag is answered with the nearest one."""

    def parse_args(self, args: Sequence[str] | None = None, namespace: None = None) -> argparse.Namespace:  # type: ignore[override]
        """Parse or exit with status 2 and the reason on stderr."""
        parsed, unknown = self.parse_known_args(args)
        if unknown:
            self._unknown(unknown[0].split("=")[0])
        return parsed

    def error(self, message: str) -> NoReturn:
        """Exit with status 2 and one line; the usage is what --help prints."""
        hint = "" if "--help" in message else f" (see {self.prog} --help)"
        self.exit(2, f"{self.prog}: error: {' '.join(message.split())}{hint}\n")

    def _unknown(self, name: str) -> NoReturn:
        near = difflib.get_close_matches(name, list(self._option_string_actions), n=1, cutoff=NEAR)
        self.error(f"unrecognized argument {shown(name)}" + (f": did you mean {near[0]}?" if near else ""))


def shown(text: str) -> str:
    """As much of what was typed as belongs into a message."""
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}… ({len(text)} characters)"


def whole_number(text: str) -> int:
    """The type of a flag: a whole number that fits into 64 bits."""
    try:
        value = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be a whole number, got {shown(text)!r}") from None
    if abs(value) > MOST:
        raise argparse.ArgumentTypeError(f"must be less than 2^63, got {shown(text)}")
    return value


def at_least(least: int, what: str = "") -> Callable[[str], int]:
    """The type of a flag: a whole number of at least `least`, which is `what`."""

    def parse(text: str) -> int:
        value = whole_number(text)
        if value < least:
            raise argparse.ArgumentTypeError(f"must be at least {least}{what and f' ({what})'}, got {value}")
        return value

    return parse


def number(text: str, most: float, unit: str) -> float:
    """A number from 0 to `most`; its `unit` is not written."""
    return _number(text, most, f"at least 0 ({unit})", lambda value: value >= 0)


def above_zero(text: str, most: float, unit: str = "") -> float:
    """A number above 0, up to `most`; its `unit`, if it has one, is not written."""
    return _number(text, most, f"more than 0{unit and f' ({unit})'}", lambda value: value > 0)


def _number(text: str, most: float, expected: str, is_enough: Callable[[float], bool]) -> float:
    try:
        value = float(text)
    except ValueError:
        value = float("nan")
    if not is_enough(value) or value == float("inf"):
        raise argparse.ArgumentTypeError(f"must be a number of {expected}, got {shown(text)!r}")
    if value > most:
        raise argparse.ArgumentTypeError(f"must be at most {most:g}, got {shown(text)}")
    return value


def not_empty(text: str) -> str:
    """The type of a flag: text that names something."""
    if not text.strip():
        raise argparse.ArgumentTypeError("must not be empty")
    return text
