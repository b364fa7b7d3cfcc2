"""Every test runs under a hang time-out (pyproject.toml) that dumps all stacks."""

from __future__ import annotations

import faulthandler

import pytest


@pytest.fixture(autouse=True, scope="session")
def _stacks_on_crash() -> None:
    faulthandler.enable()
