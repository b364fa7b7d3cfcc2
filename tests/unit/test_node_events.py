"""The event queue: bounded by its sources, readable exactly while one waits, never blocking."""

import os
import select

from cachesvc.node.events import EventQueue, EventSource, OpEnded
from cachesvc.outcomes import OpEnd


class Source(EventSource):
    def __init__(self, op):
        self.op = op
        self.news = []

    def take_events(self):
        taken, self.news = self.news, []
        return taken


def is_readable(queue):
    return bool(select.select([queue.fileno()], [], [], 0)[0])


def test_a_source_stands_in_the_queue_once_and_tells_everything():
    queue = EventQueue()
    source = Source(1)
    for _ in range(1000):
        source.news.append(OpEnded(1, OpEnd.COMPLETED))
        queue.announce(source)
    assert len(queue) == 1
    assert len(queue.poll()) == 1000
    assert queue.poll() == []
    queue.close()


def test_readable_exactly_while_a_source_waits():
    queue = EventQueue()
    assert not is_readable(queue)
    first, second = Source(1), Source(2)
    queue.announce(first)
    queue.announce(second)
    assert is_readable(queue)
    queue.poll()
    assert not is_readable(queue)
    queue.announce(first)
    assert is_readable(queue)
    queue.close()


def test_sources_come_in_the_order_of_their_first_news():
    queue = EventQueue()
    sources = [Source(op) for op in range(5)]
    for source in sources:
        source.news.append(OpEnded(source.op, OpEnd.COMPLETED))
        queue.announce(source)
    assert [event.op for event in queue.poll()] == [0, 1, 2, 3, 4]
    queue.close()


def test_close_gives_the_descriptor_back_and_silences_late_news():
    queue = EventQueue()
    fd = queue.fileno()
    queue.close()
    queue.close()
    queue.announce(Source(1))
    assert queue.poll() == []
    assert queue.fileno() == -1
    try:
        os.fstat(fd)
        is_open = True
    except OSError:
        is_open = False
    assert not is_open
