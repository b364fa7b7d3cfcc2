"""What a request's pages are shared in may end while it lives: nothing of it is kept, and nothing kept is loaded."""

from __future__ import annotations

from cachesvc.identity import scope_digest
from cachesvc.outcomes import Bypass
from tests.helpers.vllm_engine import PAGE, Engine, prompt

NUM_PAGES = 6


def new_scope(engine: Engine, scope: bytes | Bypass) -> None:
    """As when an adapter's files have changed."""
    engine.half._scope_of = lambda request, salt: scope


def test_pages_whose_scope_ended_before_they_were_copied_are_not_kept() -> None:
    """The engine may have loaded what is there now before it computed them."""
    with Engine(auto=False) as engine:
        engine.add(prompt(1, NUM_PAGES * PAGE + 1))
        engine.step()
        new_scope(engine, Bypass.ADAPTER)
        engine.run_copies()
        engine.finish_all()
        assert engine.region.count_frames().readable == 0
        assert engine.count('hicache_dropped_pages_total{reason="scope_changed"}') == NUM_PAGES
        engine.check()


def test_pages_of_a_scope_that_has_ended_are_not_loaded() -> None:
    with Engine() as engine:
        tokens = prompt(2, NUM_PAGES * PAGE + 1)
        engine.run(tokens)
        engine.forget_device()
        request = engine.add(tokens)
        new_scope(engine, scope_digest(salt="other"))
        engine.finish_all()
        assert engine.load_failures == {request.request_id} and engine.num_loaded_pages == 0
        engine.check()


def test_pages_are_stored_anew_after_a_reset_while_the_copies_from_before_still_run() -> None:
    """Their names are the same, and what runs is for nobody."""
    with Engine(auto=False) as engine:
        tokens = prompt(3, NUM_PAGES * PAGE + 1)
        engine.add(tokens)
        engine.step()
        assert engine.half.reset() is True
        again = engine.add(tokens)
        engine.step()
        assert again.state == "finished", "it does not wait for copies that are for nobody"
        engine.run_copies()
        engine.finish_all()
        engine.forget_device()
        assert engine.run_all(tokens).num_external == NUM_PAGES * PAGE
        assert engine.count('hicache_dropped_pages_total{reason="scope_changed"}') == NUM_PAGES
        engine.check()


def test_all_copies_that_read_a_block_end_before_somebody_else_writes_it() -> None:
    """The pool knows one watcher for each block, and two requests that share it may both be storing it."""
    with Engine(auto=False, num_blocks=2 * NUM_PAGES) as engine:
        tokens = prompt(4, NUM_PAGES * PAGE + 1)
        engine.add(tokens)
        engine.step()
        engine.half.reset()
        engine.add(tokens)  # from the device, and stored in the new scope
        engine.step()
        assert len(engine.workers[0].ops) == 2
        engine.add(prompt(5, NUM_PAGES * PAGE + 1))
        engine.step()
        assert engine.num_settled == 2
        engine.run_copies()
        engine.finish_all()
        engine.check()
