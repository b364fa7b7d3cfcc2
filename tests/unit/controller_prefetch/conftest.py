"""Storage that has all pages of `TOKENS`."""

from __future__ import annotations

import pytest

from storage_backends.memory.backend import open_backend
from tests.helpers.stored_prompts import stored
from tests.oracles.pages import ScriptedBackend
from tests.unit.controller_prefetch.rigs import TOKENS


@pytest.fixture
def backend() -> ScriptedBackend:
    return ScriptedBackend(stored(open_backend({}), TOKENS))
