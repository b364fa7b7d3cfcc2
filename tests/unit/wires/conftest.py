"""The two ends of a connection."""

import socket

import pytest

from tests.oracles.pages import HANG_S


@pytest.fixture
def ends():
    ours, theirs = socket.socketpair()
    theirs.settimeout(HANG_S)
    with ours, theirs:
        yield ours, theirs
