"""How to install what is missing: an extra of this distribution. Said here, for every message that says it."""

from __future__ import annotations


def install(extra: str) -> str:
    """For the end of a message: the extra's name, and both ways to it."""
    return (
        f"install the extra {extra!r}: in a clone pip install -e '.[{extra}]', "
        f'with a wheel pip install "$(ls cachesvc-*.whl)[{extra}]"'
    )
