"""JSON from a client, field by field: typed access, and complaints that name the field and what is expected."""

from __future__ import annotations

import difflib
import json
import math
from collections.abc import Callable, Collection, Mapping
from typing import NoReturn, TypeGuard, TypeVar

T = TypeVar("T")


class BadRequest(ValueError):
    """The client asked for something that cannot be; the message says what was wrong and what is expected."""


class Fields:
    """Typed access to a JSON object; complaints name the path. A field that is null counts as absent."""

    def __init__(self, raw: object, path: str = "") -> None:
        if not isinstance(raw, dict):
            raise BadRequest(f"{path or 'the body'} must be a JSON object, got {kind_of(raw)}")
        self._raw = raw
        self._prefix = f"{path}." if path else ""

    def only(self, known: Collection[str], neutral: Mapping[str, tuple[object, ...]]) -> None:
        """Refuse fields that are not `known`, except `neutral` ones with a value that asks for nothing."""
        for name, value in self._raw.items():
            if name in known or (name in neutral and (value is None or value in neutral[name])):
                continue
            if name in neutral:
                raise BadRequest(f"{self._prefix}{name} is not supported, got {shown(value)}")
            near = difflib.get_close_matches(str(name), known, n=1)
            hint = f"did you mean {near[0]}?" if near else f"known fields: {', '.join(sorted(known))}"
            raise BadRequest(f"unknown field {self._prefix}{name} ({hint})")

    def get(self, name: str) -> object:
        """The raw value or None."""
        return self._raw.get(name)

    def path(self, name: str) -> str:
        """How the field is called in a complaint."""
        return self._prefix + name

    def fail(self, name: str, expected: str) -> NoReturn:
        """Complain about a field."""
        raise BadRequest(f"{self._prefix}{name} must be {expected}, got {shown(self._raw.get(name))}")

    def boolean(self, name: str, default: bool) -> bool:
        """true or false."""
        value = self.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            self.fail(name, "true or false")
        return value

    def integer(self, name: str, default: T, *, least: int, most: int | None = None) -> int | T:
        """A whole number in [least, most]."""
        value = self.get(name)
        if value is None:
            return default
        if not is_integer(value) or value < least or (most is not None and value > most):
            self.fail(name, f"a whole number of at least {least}" + ("" if most is None else f" and at most {most}"))
        return value

    def number(self, name: str, default: float, *, expected: str, valid: Callable[[float], bool]) -> float:
        """A finite number that is `valid`."""
        value = self.get(name)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float) or not (math.isfinite(value) and valid(value)):
            self.fail(name, expected)
        return float(value)

    def string(self, name: str) -> str | None:
        """A string or None."""
        value = self.get(name)
        if value is not None and not isinstance(value, str):
            self.fail(name, "a string")
        return value


def parse_json(body: bytes) -> object:
    """The body's JSON value. NaN and infinities are refused."""

    def refuse(constant: str) -> NoReturn:
        raise BadRequest(f"the body is not JSON: {constant} is no number in JSON")

    try:
        return json.loads(body, parse_constant=refuse)
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise BadRequest(f"the body is not JSON: {error}") from None
    except RecursionError:
        raise BadRequest("the body is not JSON that can be read: nested too deep") from None
    except BadRequest:
        raise
    except ValueError:  # the interpreter's limit on the digits of a whole number
        raise BadRequest("the body is not JSON that can be read: a number has too many digits") from None


def is_integer(value: object) -> TypeGuard[int]:
    """A JSON whole number; true and false are none."""
    return isinstance(value, int) and not isinstance(value, bool)


def shown(value: object) -> str:
    """A value for a message, short."""
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}... ({kind_of(value)})"


def kind_of(value: object) -> str:
    """The JSON name of a value's type."""
    names = {dict: "an object", list: "a list", str: "a string", bool: "a boolean", type(None): "null"}
    return names.get(type(value), "a number")
