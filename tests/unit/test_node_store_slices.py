"""Two slices of one lane with workers at a time, every order of their ends decided by the test: what is told, in which
order, and what is not."""

import numpy as np
import pytest
from cachekernels.pages import object_ids

from cachesvc.node.events import OpEnded, PagesStored
from cachesvc.node.node import Node
from cachesvc.node.parts import NodeOptions
from cachesvc.node.tiers import Tier, TierOptions
from storage_backends.base import Outcome
from tests.helpers.held_slices import HeldSlices
from tests.oracles.pages import CANCELLED, EXISTS, OK, Engine, chain

KEYS = chain(1, 20)
FRAMES = np.arange(20, dtype=np.int32)
TIMEOUT, CHANGED, FAILED = int(Outcome.TIMEOUT), int(Outcome.CHANGED), int(Outcome.FAILED)


class Workers(HeldSlices):
    def begin(self, first, end):
        """The next slice, which has these pages."""
        held = super().begin()
        assert held.keys == KEYS[first:end].tolist()
        return held


@pytest.fixture
def node(backend, clock):
    with Node([Tier("memory", backend)], manual=True, clock=clock, options=NodeOptions(slice_pages=4)) as node:
        yield node
        node.tick()
        assert not any(node._audit.broken().values())
        assert node._audit._is_idle()


@pytest.fixture
def workers(node, monkeypatch):
    return Workers(node, monkeypatch)


@pytest.fixture
def engine(node):
    engine = Engine(node, "writer")
    engine.fill(KEYS, FRAMES)
    return engine


def offer(engine, *pages):
    first, end = pages
    return engine.backup(KEYS[first:end], FRAMES[first:end], first)


def stored(backend, keys=KEYS):
    return np.flatnonzero(backend.inner.contains(object_ids(keys)) == Outcome.OK).tolist()


def told(engine):
    """What a poll brings, op by op: (op, first page, outcomes), or (op, end)."""
    news = []
    for event in engine.poll():
        match event:
            case PagesStored(op, first, results):
                news.append((op, first, results.tolist()))
            case OpEnded(op, reason):
                news.append((op, str(reason)))
    return news


def test_a_second_slice_begins_while_the_first_runs_and_no_third(node, engine, workers):
    offer(engine, 0, 12)
    first, second = workers.begin(0, 4), workers.begin(4, 8)
    assert not node.run_one()
    first.end()
    third = workers.begin(8, 12)
    second.end()
    third.end()


def test_where_stores_may_have_one_worker_there_is_one_slice(node, engine, workers):
    node._parts.pool._max_running_stores = 1
    offer(engine, 0, 12)
    first = workers.begin(0, 4)
    assert not node.run_one()
    first.end()
    workers.begin(4, 8).end()
    workers.run_all()


def test_a_slice_that_ends_before_the_one_before_it_waits_to_be_told(node, engine, workers, backend):
    ops = [offer(engine, 0, 4), offer(engine, 4, 6), offer(engine, 6, 8)]
    first, second = workers.begin(0, 4), workers.begin(4, 8)
    second.end()
    assert stored(backend) == [4, 5, 6, 7]
    assert told(engine) == []
    first.end()
    pages = [(ops[0], 0, [OK] * 4), (ops[1], 0, [OK] * 2), (ops[2], 0, [OK] * 2)]
    assert told(engine) == [news for op in pages for news in (op, (op[0], "completed"))]
    assert node.counters.stored_pages.value("ok") == 8


def test_pages_of_an_op_are_told_in_order(engine, workers):
    op = offer(engine, 0, 12)
    first, second = workers.begin(0, 4), workers.begin(4, 8)
    second.end()
    first.end()
    assert told(engine) == [(op, 0, [OK] * 8)]
    third = workers.begin(8, 12)
    third.end()
    assert told(engine) == [(op, 8, [OK] * 4), (op, "completed")]


def test_an_op_goes_on_while_its_second_slice_runs(engine, workers):
    op = offer(engine, 0, 8)
    first, second = workers.begin(0, 4), workers.begin(4, 8)
    first.end()
    assert told(engine) == [(op, 0, [OK] * 4)]
    second.end()
    assert told(engine) == [(op, 4, [OK] * 4), (op, "completed")]


def test_no_slice_is_held_up_by_one_that_waits_to_be_told_and_none_begins(node, engine, workers):
    """What waits to be told is bounded."""
    offer(engine, 0, 12)
    first, second = workers.begin(0, 4), workers.begin(4, 8)
    second.end()
    assert not node.run_one()
    first.end()
    workers.begin(8, 12).end()


@pytest.mark.parametrize("is_second_over", [False, True])
def test_a_slice_sent_back_takes_the_one_behind_it_along(node, engine, workers, backend, clock, is_second_over):
    one, other = offer(engine, 0, 6), offer(engine, 6, 12)
    first, second = workers.begin(0, 4), workers.begin(4, 8)
    if is_second_over:
        second.end()
    first.end([OK, OK, TIMEOUT, OK])
    assert told(engine) == [(one, 0, [OK] * 2)]
    if not is_second_over:
        clock.advance(10)
        assert not node.run_one()  # not before it has ended
        second.end()
    assert told(engine) == []
    assert not node.run_one()
    clock.advance(0.25)
    again = workers.begin(2, 6)
    again.end()
    workers.run_all()
    assert told(engine) == [
        (one, 2, [OK, OK, EXISTS, EXISTS]),
        (one, "completed"),
        (other, 0, [EXISTS] * 2 + [OK] * 4),
        (other, "completed"),
    ]
    assert node.counters.store_retries.value() == 1
    assert node.counters.unsaved_pages.value("tier") == 0


def test_a_second_slice_that_is_sent_back_keeps_what_the_first_had(node, engine, workers, clock):
    op = offer(engine, 0, 12)
    first, second = workers.begin(0, 4), workers.begin(4, 8)
    second.end([OK, TIMEOUT, TIMEOUT, TIMEOUT])
    assert told(engine) == []
    first.end()
    assert told(engine) == [(op, 0, [OK] * 5)]
    assert not node.run_one()
    clock.advance(0.25)
    workers.begin(5, 9).end()
    workers.run_all()
    assert told(engine) == [(op, 5, [OK] * 7), (op, "completed")]


def test_one_slice_at_a_time_until_a_page_has_its_answer(node, engine, workers, clock):
    offer(engine, 0, 12)
    first, second = workers.begin(0, 4), workers.begin(4, 8)
    first.end([TIMEOUT] * 4)
    second.end([TIMEOUT] * 4)
    clock.advance(0.25)
    again = workers.begin(0, 4)
    assert not node.run_one()
    again.end()
    second, third = workers.begin(4, 8), workers.begin(8, 12)
    second.end()
    third.end()


def test_the_next_slice_learns_on_a_worker_that_it_has_to_pause(node, engine, workers, clock):
    node._parts.pool._max_running_stores = 1
    op = offer(engine, 0, 8)
    first = workers.begin(0, 4)  # the next one stands in the pool
    first.end([TIMEOUT] * 4)
    assert node.run_one()
    assert not node.run_one()
    clock.advance(0.25)
    workers.begin(0, 4).end()
    workers.run_all()
    assert told(engine)[-1] == (op, "completed")


def test_a_pause_that_nobody_waits_for_is_forgotten(engine, workers):
    op = offer(engine, 0, 4)
    first = workers.begin(0, 4)
    engine.client.cancel(op)
    first.end([TIMEOUT] * 4)
    assert told(engine) == [(op, 0, [CANCELLED] * 4), (op, "cancelled")]
    other = offer(engine, 4, 8)
    workers.begin(4, 8).end()
    assert told(engine)[-1] == (other, "completed")


def test_cancel_with_both_slices_running_answers_both_and_drops_the_rest(engine, workers, backend):
    op = offer(engine, 0, 20)
    first, second = workers.begin(0, 4), workers.begin(4, 8)
    engine.client.cancel(op)
    assert told(engine) == [(op, 8, [CANCELLED] * 12)]
    second.end()
    assert told(engine) == []
    first.end()
    assert told(engine) == [(op, 0, [OK] * 8), (op, "cancelled")]
    workers.run_all()
    assert stored(backend) == list(range(8))


def test_a_cancelled_op_gives_its_place_to_the_next_one(engine, workers):
    one, other = offer(engine, 0, 12), offer(engine, 12, 16)
    first = workers.begin(0, 4)
    engine.client.cancel(one)
    second = workers.begin(12, 16)
    second.end()
    first.end()
    assert told(engine)[-1] == (other, "completed")


def test_cancel_while_the_slice_behind_one_that_was_sent_back_runs(engine, workers, clock):
    op = offer(engine, 0, 12)
    first, second = workers.begin(0, 4), workers.begin(4, 8)
    first.end([OK, TIMEOUT, TIMEOUT, TIMEOUT])
    engine.client.cancel(op)
    assert told(engine) == [(op, 8, [CANCELLED] * 4), (op, 0, [OK])]
    second.end()
    assert told(engine) == [(op, 1, [CANCELLED] * 7), (op, "cancelled")]


def test_cancel_of_an_op_that_waits_for_the_slice_before_it_to_be_told(engine, workers):
    one, other = offer(engine, 0, 4), offer(engine, 4, 8)
    first, second = workers.begin(0, 4), workers.begin(4, 8)
    second.end()
    engine.client.cancel(other)
    assert told(engine) == []
    first.end()
    assert told(engine) == [(one, 0, [OK] * 4), (one, "completed"), (other, 0, [OK] * 4), (other, "completed")]


@pytest.mark.parametrize("is_second_over", [False, True])
def test_a_bad_page_in_the_first_slice_ends_the_op_after_its_second(node, engine, workers, is_second_over):
    one, other = offer(engine, 0, 12), offer(engine, 12, 14)
    first, second = workers.begin(0, 4), workers.begin(4, 8)
    if is_second_over:
        second.end()
        first.end([OK, CHANGED, OK, OK])
    else:
        first.end([OK, CHANGED, OK, OK])
        assert told(engine) == [(one, 0, [OK, CHANGED, OK, OK])]
        workers.begin(12, 14).end()  # nothing more of the op that is lost
        second.end()
    workers.run_all()
    engine.poll()
    assert engine.outcomes[one].tolist() == [OK, CHANGED, OK, OK] + [OK] * 4 + [CANCELLED] * 4
    assert engine.ends == {one: "bad_page", other: "completed"}
    assert node.counters.unsaved_pages.value("after_bad_page") == 4


def test_an_op_with_a_bad_page_is_not_complete_by_its_last_slice(engine, workers):
    op = offer(engine, 0, 8)
    first, second = workers.begin(0, 4), workers.begin(4, 8)
    first.end([CHANGED, OK, OK, OK])
    second.end()
    assert told(engine) == [(op, 0, [CHANGED, OK, OK, OK] + [OK] * 4), (op, "bad_page")]


def test_a_worker_fails_in_the_first_slice_while_the_second_runs(node, engine, workers):
    one, other = offer(engine, 0, 6), offer(engine, 6, 8)
    first, second = workers.begin(0, 4), workers.begin(4, 8)
    first.end(ZeroDivisionError())
    assert told(engine) == [(one, 0, [FAILED] * 4)]
    second.end()
    assert told(engine) == [(one, 4, [OK] * 2), (one, "failed"), (other, 0, [OK] * 2), (other, "completed")]
    assert node.counters.unsaved_pages.value("failed") == 4


def test_a_worker_fails_in_the_second_slice_while_the_first_runs(node, engine, workers):
    one, other = offer(engine, 0, 6), offer(engine, 6, 12)
    first, second = workers.begin(0, 4), workers.begin(4, 8)
    second.end(ZeroDivisionError())
    assert told(engine) == []
    first.end()
    assert told(engine) == [
        (one, 0, [OK] * 4 + [FAILED] * 2),
        (one, "failed"),
        (other, 0, [FAILED] * 2 + [CANCELLED] * 4),
        (other, "failed"),
    ]
    assert node.counters.unsaved_pages.value("failed") == 8
    assert node.counters.worker_exceptions.value() == 1


def test_a_worker_that_failed_behind_a_slice_that_is_sent_back_has_another_try(engine, workers, clock):
    one, other = offer(engine, 0, 4), offer(engine, 4, 8)
    first, second = workers.begin(0, 4), workers.begin(4, 8)
    second.end(ZeroDivisionError())
    first.end([TIMEOUT] * 4)
    clock.advance(0.25)
    workers.run_all()
    assert told(engine) == [(one, 0, [OK] * 4), (one, "completed"), (other, 0, [OK] * 4), (other, "completed")]


def test_a_worker_that_fails_before_it_has_pages_leaves_the_lane_going(node, engine, workers, monkeypatch):
    op = offer(engine, 0, 8)
    with monkeypatch.context() as broken:
        broken.setattr(node._parts.writes, "blocking", lambda keys: 1 / 0)
        assert node.run_one()
    workers.run_all()
    assert told(engine) == [(op, 0, [OK] * 8), (op, "completed")]


def test_what_goes_wrong_after_a_slice_has_landed_leaves_it_landed(node, engine, workers, monkeypatch):
    monkeypatch.setattr(node._parts.tiers, "used_together", lambda ids: 1 / 0)
    op = offer(engine, 0, 8)
    workers.run_all()
    assert told(engine) == [(op, 0, [OK] * 8), (op, "completed")]
    assert node.counters.worker_exceptions.value() == 1
    assert engine.client._session._running_slices == 0


def test_pages_of_both_slices_were_used_together_once(node, engine, workers, monkeypatch):
    used = []
    monkeypatch.setattr(node._parts.tiers, "used_together", lambda ids: used.append(ids[:, :32].tolist()))
    offer(engine, 0, 8)
    first, second = workers.begin(0, 4), workers.begin(4, 8)
    second.end()
    assert used == []
    first.end()
    assert used == [KEYS[:8].tolist()]


def test_each_page_is_offered_once_by_the_slice_that_has_it(node, engine, workers, monkeypatch):
    """The second slice is stored before the first has begun to be."""
    offered = []
    submit = node._parts.pool.submit
    monkeypatch.setattr(node._parts.tiers, "note_uses", lambda ids: offered.append(ids[:, :32].tolist()))
    op = offer(engine, 0, 8)

    def at_once(work):
        submit(work)
        workers.run_all()

    monkeypatch.setattr(node._parts.pool, "submit", at_once)
    workers.run_all()
    assert offered == [KEYS[4:8].tolist(), KEYS[:4].tolist()]
    assert told(engine)[-1] == (op, "completed")


def test_pages_that_are_stored_again_are_not_offered_again(backend, clock, monkeypatch):
    tier = Tier("memory", backend, TierOptions(admit_after=2))
    with Node([tier], manual=True, clock=clock, options=NodeOptions(slice_pages=4)) as choosy:
        workers = Workers(choosy, monkeypatch)
        engine = Engine(choosy, "writer")
        engine.fill(KEYS, FRAMES)
        offer(engine, 0, 8)
        first, second = workers.begin(0, 4), workers.begin(4, 8)
        first.end([TIMEOUT] * 4)
        second.end()
        clock.advance(0.25)
        workers.run_all()
        assert stored(backend) == []


def test_a_key_of_the_first_slice_waits_for_it(node, engine, workers, backend):
    one, other = offer(engine, 0, 4), offer(engine, 2, 8)
    first = workers.begin(0, 4)
    assert node.run_one()
    assert not node.run_one()
    assert node.counters.parked.value("backup") == 1
    first.end()
    workers.run_all()
    assert told(engine)[-2:] == [(other, 0, [EXISTS] * 2 + [OK] * 4), (other, "completed")]
    assert set(backend.writes.values()) == {1}
    assert engine.ends[one] == "completed"


def test_a_slice_ends_before_a_key_of_the_first_one(engine, workers, backend):
    offer(engine, 0, 4)
    offer(engine, 4, 6)
    last = offer(engine, 0, 2)
    first, second = workers.begin(0, 4), workers.begin(4, 6)
    second.end()
    first.end()
    workers.run_all()
    assert told(engine)[-2:] == [(last, 0, [EXISTS] * 2), (last, "completed")]
    assert set(backend.writes.values()) == {1}


def test_a_slice_parked_on_the_first_one_pauses_with_it(node, engine, workers, clock):
    one, other = offer(engine, 0, 4), offer(engine, 0, 4)
    first = workers.begin(0, 4)
    assert node.run_one()  # parked
    first.end([TIMEOUT] * 4)
    assert node.run_one()  # learns that it has to pause
    assert not node.run_one()
    clock.advance(0.25)
    workers.run_all()
    assert told(engine) == [(one, 0, [OK] * 4), (one, "completed"), (other, 0, [EXISTS] * 4), (other, "completed")]


def test_a_slice_that_waits_to_be_told_keeps_nobody_from_its_pages(node, engine, workers):
    twin = Engine(node, "twin")
    twin.fill(KEYS, FRAMES)
    offer(engine, 0, 8)
    first, second = workers.begin(0, 4), workers.begin(4, 8)
    second.end()
    op = twin.backup(KEYS[4:8], FRAMES[4:8], 4)
    workers.begin(4, 8).end()
    assert told(twin) == [(op, 0, [EXISTS] * 4), (op, "completed")]
    first.end()


def test_the_first_slice_of_a_lane_goes_before_the_second_of_another(node, engine, workers):
    twin = Engine(node, "twin")
    twin.fill(KEYS, FRAMES)
    offer(engine, 0, 8)
    twin.backup(KEYS[8:16], FRAMES[8:16], 8)
    slices = [workers.begin(0, 4), workers.begin(8, 12), workers.begin(4, 8), workers.begin(12, 16)]
    for one in slices:
        one.end()


def test_a_drain_out_of_time_has_told_a_contiguous_start(engine, workers, backend):
    op = offer(engine, 0, 12)
    first, second = workers.begin(0, 4), workers.begin(4, 8)
    second.end()
    assert engine.client.drain(0.0) == 1
    assert told(engine) == [(op, 8, [CANCELLED] * 4)]
    assert stored(backend) == [4, 5, 6, 7]  # what the first slice lacks is missing before it
    first.end()
    assert told(engine) == [(op, 0, [OK] * 8), (op, "drained")]


def test_detach_keeps_the_region_until_both_slices_have_ended(node, engine, workers, backend):
    offer(engine, 0, 12)
    session = engine.client._session
    first, second = workers.begin(0, 4), workers.begin(4, 8)
    engine.client.detach()
    second.end()
    assert not session.is_released
    first.end()
    assert session.is_released
    workers.run_all()
    assert stored(backend) == list(range(8))
    assert not session.unfinished()
    assert session.lane.waiting_pages == 0


def test_closing_the_node_answers_what_has_landed(backend, clock, monkeypatch):
    """Nothing of the second slice is lost because the first comes after the deadline."""
    node = Node([Tier("memory", backend)], manual=True, clock=clock, options=NodeOptions(slice_pages=4))
    workers = Workers(node, monkeypatch)
    engine = Engine(node)
    engine.fill(KEYS, FRAMES)
    session = engine.client._session
    offer(engine, 0, 12)
    first, second = workers.begin(0, 4), workers.begin(4, 8)
    second.end()
    assert node.close(0.0) == 4
    first.end([OK] * 4)
    assert session.lane.waiting_pages == 0
    assert node.counters.stored_pages.value("ok") == 8
