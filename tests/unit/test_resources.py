"""The leak check itself: growth is seen, shrinking is not."""

from __future__ import annotations

import os
import threading

from tests.helpers.resources import Resources, growth, resources


def test_a_descriptor_and_a_thread_are_seen() -> None:
    before = resources()
    reader, writer = os.pipe()
    stop = threading.Event()
    thread = threading.Thread(target=stop.wait)
    thread.start()
    try:
        grown = growth(before)
    finally:
        stop.set()
        thread.join()
        os.close(reader)
        os.close(writer)
    assert [line.split(":")[0] for line in grown] == ["threads", "descriptors"]
    assert growth(before) == []
    assert growth(Resources(before.threads + 1, before.descriptors + 1)) == []
