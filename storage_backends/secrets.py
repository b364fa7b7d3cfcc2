"""What may be shown and written to logs: text and options without the secrets in them."""

from __future__ import annotations

import re
from typing import Any
from urllib.parse import unquote

HIDDEN = "***"
_SECRET = re.compile(
    r"pass|pwd|secret|token|credential|private|auth|signature|sas|(account|api)_?key|connection_?string", re.IGNORECASE
)
_SECRET_IN_QUERY = re.compile(rf"{_SECRET.pattern}|key|sig", re.IGNORECASE)
_URL = re.compile(r"(?<=://)[^\s,]+")
_PASSWORD = re.compile(r"^([^@:/?#]*:)[^?#]*(?=@)")  # to the last @: whoever writes one into a password gets it hidden
_PARAMETER = re.compile(r"(?<=[?&;#])([^=&;#]+)=([^&;#]*)")


def without_secrets(value: Any, name: str = "") -> Any:
    """`value`, of the option `name`, as it may be shown: text, or tables and lists of it. What a secret's name stands
    for is hidden as a whole, and in any other text the passwords and secret parameters of URLs."""
    if isinstance(value, dict):
        return {key: without_secrets(inner, str(key)) for key, inner in value.items()}
    if isinstance(value, list):
        return [without_secrets(inner, name) for inner in value]
    if isinstance(value, str):
        return HIDDEN if value and _SECRET.search(name) else text_without_secrets(value)
    return value


def text_without_secrets(text: str) -> str:
    """`text` with passwords and secret parameters hidden in the URLs that stand in it."""
    return _URL.sub(_url_without_secrets, text)


def _url_without_secrets(url: re.Match[str]) -> str:
    """What follows the scheme, with password and the values of secret parameters hidden."""
    return _PARAMETER.sub(_parameter, _PASSWORD.sub(rf"\1{HIDDEN}", url[0]))


def _parameter(found: re.Match[str]) -> str:
    return f"{found[1]}={HIDDEN}" if _SECRET_IN_QUERY.search(unquote(found[1])) else found[0]
