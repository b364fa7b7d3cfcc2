"""Ops that want pages which another one is reading: they wait for it, and what becomes of them."""

import pytest

from storage_backends.base import Outcome, outcomes
from tests.oracles.pages import CANCELLED, Engine, chain, indices, run_all
from tests.unit.node_prefetch.pages import FRAMES, KEYS, frames_in, joins_in_mid_read


@pytest.mark.usefixtures("stored")
def test_a_joiners_copy_is_found_when_the_reader_has_gone(node, engine, backend):
    joiner = Engine(node, "joiner")
    joins_in_mid_read(node, backend, joiner, 4)
    engine.prefetch(KEYS[:4], FRAMES[:4])
    run_all(node)
    assert node.counters.pages_from.value("joined") == 4
    engine.client.detach()
    backend.before.clear()
    assert node._parts.pages.held(KEYS[:4]).all()


@pytest.mark.usefixtures("stored")
def test_a_joiner_outlives_the_region_it_waited_for(node, engine, backend):
    joiner = Engine(node, "joiner")
    ops = joins_in_mid_read(node, backend, joiner, 4, then=engine.client.detach)
    engine.prefetch(KEYS[:4], FRAMES[:4])
    run_all(node)
    joiner.poll()
    assert joiner.ends == {ops[0]: "completed"}
    joiner.check_pages(KEYS[:4], FRAMES[:4])


@pytest.mark.usefixtures("stored")
def test_an_op_cancelled_on_its_way_to_park_ends_instead(node, engine, backend, monkeypatch):
    joiner = Engine(node, "joiner")
    ops = []
    copy = node._parts.pages.copy

    def copy_and_cancel(*args, **kwargs):
        if ops:
            joiner.client.cancel(ops[0])
        return copy(*args, **kwargs)

    def other_comes(_):
        if not ops:
            ops.append(joiner.prefetch(KEYS[:4], FRAMES[:4]))
            with monkeypatch.context() as patched:
                patched.setattr(node._parts.pages, "copy", copy_and_cancel)
                node.run_one()
            joiner.poll()
            assert joiner.ends == {ops[0]: "cancelled"}

    backend.before["get"] = other_comes
    op = engine.prefetch(KEYS[:4], FRAMES[:4])
    run_all(node)
    engine.poll()
    assert engine.ends == {op: "completed"}


@pytest.mark.usefixtures("stored")
def test_fifty_ops_that_share_a_prefix_make_one_read_per_page(node, engine, backend):
    ops = []

    def others_come(_):
        if not ops:
            ops.extend(engine.prefetch(KEYS[:3], indices(*range(n, n + 3))) for n in range(20, 167, 3))
            for _ in ops:
                node.run_one()
            assert node.counters.parked.value("prefetch") == 49

    backend.before["get"] = others_come
    first = engine.prefetch(KEYS[:3], FRAMES[:3])
    run_all(node)
    engine.poll()
    assert len(ops) == 49
    assert {engine.ends[op] for op in [first, *ops]} == {"completed"}
    for start in range(20, 167, 3):
        engine.check_pages(KEYS[:3], indices(*range(start, start + 3)))
    assert set(backend.reads.values()) == {1}
    assert node.counters.pages_from.value("joined") == 49 * 3


@pytest.mark.usefixtures("stored")
def test_joiners_do_not_queue_behind_each_other(node, engine, backend):
    """After the read has landed, each joiner needs one step, none of which parks."""
    ops = []

    def others_come(_):
        if not ops:
            ops.extend(engine.prefetch(KEYS[:3], indices(*range(n, n + 3))) for n in range(20, 50, 3))
            for _ in ops:
                node.run_one()

    backend.before["get"] = others_come
    engine.prefetch(KEYS[:3], FRAMES[:3])
    node.run_one()
    steps = 0
    while node.run_one():
        steps += 1
    assert steps == len(ops) == 10
    assert node.counters.parked.value("prefetch") == 10


@pytest.mark.usefixtures("stored")
def test_a_joiner_whose_source_changed_reads_itself(node, engine, backend):
    joiner = Engine(node, "joiner")
    ops = joins_in_mid_read(node, backend, joiner, 3)
    engine.prefetch(KEYS[:3], FRAMES[:3])
    node.run_one()
    engine.region.begin_write(FRAMES[:3])
    backend.before.clear()
    run_all(node)
    joiner.poll()
    assert joiner.ends == {ops[0]: "completed"}
    joiner.check_pages(KEYS[:3], FRAMES[:3])
    assert set(backend.reads.values()) == {2}


def test_joiners_share_the_answer_of_a_read_that_failed(node, engine, backend):
    joiner = Engine(node, "joiner")
    ops = []

    def other_comes(ids):
        if not ops:
            ops.append(joiner.prefetch(KEYS[:3], FRAMES[:3]))
            node.run_one()
        return outcomes(len(ids), Outcome.UNSUPPORTED)

    backend.before["get"] = other_comes
    engine.prefetch(KEYS[:3], FRAMES[:3])
    run_all(node)
    joiner.poll()
    assert joiner.ends == {ops[0]: "bad_page"}
    assert joiner.outcomes[ops[0]].tolist() == [Outcome.UNSUPPORTED, CANCELLED, CANCELLED]
    assert backend.calls["get"] == 1


@pytest.mark.usefixtures("stored")
def test_a_joiner_of_a_read_whose_worker_failed_reads_itself(node, engine, backend, monkeypatch):
    joiner = Engine(node, "joiner")
    ops = joins_in_mid_read(
        node, backend, joiner, 3, then=lambda: monkeypatch.setattr(engine.region, "commit", lambda _: 1 / 0)
    )
    op = engine.prefetch(KEYS[:3], FRAMES[:3])
    run_all(node)
    engine.poll()
    joiner.poll()
    assert engine.ends == {op: "failed"}
    assert engine.outcomes[op].tolist() == [Outcome.FAILED] * 3
    assert node.counters.worker_exceptions.value() == 1
    assert joiner.ends == {ops[0]: "completed"}
    joiner.check_pages(KEYS[:3], FRAMES[:3])
    assert frames_in(engine, "lent") == 0


@pytest.mark.usefixtures("stored")
def test_cancel_of_a_joined_op_returns_its_frames_while_the_read_goes_on(node, engine, backend):
    joiner = Engine(node, "joiner")

    def cancel():
        joiner.client.cancel(ops[0])
        joiner.poll()
        assert joiner.ends == {ops[0]: "cancelled"}

    ops = joins_in_mid_read(node, backend, joiner, 4, then=cancel)
    first = engine.prefetch(KEYS[:4], FRAMES[:4])
    run_all(node)
    engine.poll()
    assert engine.ends == {first: "completed"}
    assert (joiner.region.records().generations == 0).all()


@pytest.mark.usefixtures("stored")
def test_cancel_between_the_landing_and_the_joiners_turn(node, engine, backend):
    joiner = Engine(node, "joiner")
    ops = joins_in_mid_read(node, backend, joiner, 4)
    engine.prefetch(KEYS[:4], FRAMES[:4])
    node.run_one()
    joiner.client.cancel(ops[0])
    run_all(node)
    joiner.poll()
    assert joiner.ends == {ops[0]: "cancelled"}


@pytest.mark.usefixtures("stored")
def test_the_reader_is_cancelled_and_the_joiner_still_gets_the_pages(node, engine, backend):
    joiner = Engine(node, "joiner")
    ops = joins_in_mid_read(node, backend, joiner, len(KEYS), then=lambda: engine.client.cancel(first))
    first = engine.prefetch(KEYS, FRAMES)
    run_all(node)
    engine.poll()
    joiner.poll()
    assert engine.ends == {first: "cancelled"}
    assert joiner.ends == {ops[0]: "completed"}
    joiner.check_pages(KEYS, FRAMES)
    assert set(backend.reads.values()) == {1}


@pytest.mark.usefixtures("stored")
def test_detach_with_queued_and_parked_ops_leaves_nothing(node, engine, backend):
    joiner = Engine(node, "joiner")

    def other_comes(_):
        joiner.prefetch(KEYS[:4], FRAMES[:4])
        joiner.prefetch(chain(2, 4), FRAMES[4:8])
        node.run_one()
        joiner.client.detach()

    backend.before["get"] = other_comes
    op = engine.prefetch(KEYS[:4], FRAMES[:4])
    run_all(node)
    engine.poll()
    assert engine.ends == {op: "completed"}
    assert node.counters.ops.value("prefetch", "detached") == 2
    with pytest.raises(RuntimeError, match="closed"):
        joiner.region.snapshot(FRAMES, None)
