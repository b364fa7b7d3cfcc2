"""An engine while its node is not to be had: what its log says, and what it hears of."""

import select
import threading

import numpy as np
import pytest
from cachekernels.region import Region

from cachesvc.client import reconnect
from cachesvc.client.base import AttachRefused, AttachRequest, NodeAway
from cachesvc.client.channel import ChannelClient
from cachesvc.client.reconnect import Before, News, Reconnector
from cachesvc.outcomes import AttachResult
from tests.oracles.pages import HANG_S, IDENTITY, PAGE_BYTES


class Dial:
    """Nobody is let in, for these reasons one after the other."""

    def __init__(self, reasons):
        self.reasons = list(reasons)
        self.are_told = threading.Event()

    def __call__(self):
        if not self.reasons:
            self.are_told.set()
            raise NodeAway("nobody is there")
        raise self.reasons.pop(0)


@pytest.fixture
def lines(caplog, monkeypatch):
    """The log of a reconnector that is refused for some reasons, and then finds nobody."""
    monkeypatch.setattr(reconnect, "FIRST_RETRY_S", 0.0)
    region = Region.create(4, PAGE_BYTES)
    request = AttachRequest(IDENTITY, "g", 4, PAGE_BYTES)

    def told(*reasons):
        dial = Dial(reasons)
        looking = Reconnector(dial, request, region, Before(1, bytes(16), False), HANG_S, lambda: None)
        assert dial.are_told.wait(HANG_S)
        looking.stop()
        return [record.message.removeprefix("no session with the node: ") for record in caplog.records]

    yield told
    region.close()


def no_memory(have):
    return AttachRefused(f"need 9, have {have}", AttachResult.REFUSED_MEMORY)


def test_a_reason_is_told_once_whatever_its_numbers(lines):
    busy = AttachRefused("ops still run", AttachResult.REFUSED_BUSY)
    told = lines(no_memory(3), no_memory(4), no_memory(5), busy, busy, no_memory(6))
    assert told[:3] == ["need 9, have 3", "ops still run", "need 9, have 6"]


def test_being_away_is_told_once_and_in_its_words(lines):
    told = lines(
        NodeAway("gone"), NodeAway("gone"), NodeAway("another one is there"), ConnectionRefusedError(111, "no")
    )
    assert told[:3] == ["gone", "another one is there", "[Errno 111] no"]


def test_news_that_comes_during_a_poll_is_not_slept_over(monkeypatch):
    """Whoever sleeps on the descriptor hears of frames that are his again."""
    region = Region.create(4, PAGE_BYTES)
    client = ChannelClient(Dial([]))
    client.attach(AttachRequest(IDENTITY, "g", 4, PAGE_BYTES, offer=region))
    looking = client._reconnector
    with monkeypatch.context() as patched:
        patched.setattr(client, "_listen", lambda: looking._tell(News(None, np.zeros(4, np.bool_))))
        assert client.poll() == []
    assert looking.news
    assert select.select([client.fileno()], [], [], 0)[0]
    client.poll()
    assert not looking.news
    client.detach()
