"""A medium without a limit."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.unit.bounds.media import Medium


@pytest.fixture
def medium() -> Iterator[Medium]:
    medium = Medium()
    yield medium
    medium.close()
