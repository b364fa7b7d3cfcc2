"""Loads that fail, hang, or are nobody's any more: no wrong page is a hit (T04: C8 C9 C10)."""

from __future__ import annotations

import pytest

from engine_plugin.hicache.base import CloseReason, LoadFailed
from engine_plugin.hicache.config import PrefetchPolicy
from storage_backends.memory.backend import open_backend
from tests.fault.controller.rigs import (
    FOUR_LAYERS,
    admitted,
    fail_load_at,
    on_host,
)
from tests.helpers.caches import HANG_S, PAGE, POISON, Gate, Rig, prompt


@pytest.mark.parametrize("source", ["host", "storage"])
def test_t04_a_load_that_fails_at_one_page_of_one_layer_is_never_a_hit(source: str) -> None:
    tokens = prompt(1, 10 * PAGE + 1)
    with Rig(identity=FOUR_LAYERS, backend=open_backend({}), prefetch_policy=PrefetchPolicy.WAIT_COMPLETE) as rig:
        on_host(rig, tokens)
        if source == "storage":
            assert rig.cache.flush().ok
            handle = rig.open(tokens)
            rig.settle()
            assert rig.cache.ready(handle)
            rig.cache.close(handle, None, CloseReason.ABORTED)
        fail_load_at(rig, page=6, layer=2)
        handle = admitted(rig, tokens)
        assert handle.cached.total == 10 * PAGE
        gate = rig.cache.gate([handle])
        table = handle.page_table.copy()
        seen = []
        with pytest.raises(LoadFailed) as failure:
            for layer in range(4):
                gate.wait(layer)
                seen.append(layer)
                assert not (rig.pool.memory[layer][:, table[:10]] == POISON).all(axis=-1).any()
        assert seen in ([], [0], [0, 1])  # layer 2 was never announced; the ones before may have been missed
        assert failure.value.handles == (handle,)
        assert failure.value.good_tokens == (6 * PAGE,)
        rig.cache.load_failed(failure.value)
        assert rig.check_readable(tokens) == 6  # what the tree would serve now, compared byte by byte
        rig.cache.check()
        rig.cache.close(handle, None, CloseReason.LOAD_FAILED)
        rig.transfer.bad_load = lambda pages, at: None
        again = admitted(rig, tokens, max_cached_tokens=6 * PAGE)
        assert again.cached.total == 6 * PAGE
        rig.prefill(again)  # recomputes pages 6 to 9
        rig.cache.close(again, tokens, CloseReason.FINISHED)
        rig.settle()
        rig.cache.check()
        assert rig.check_readable(tokens) == 10
        assert rig.drops() == {"load_failed": 4}


def test_everybody_who_was_promised_a_failed_page_learns_of_it_and_nobody_else() -> None:
    tokens = prompt(1, 10 * PAGE + 1)
    with Rig() as rig:
        on_host(rig, tokens)
        fail_load_at(rig, page=6, layer=1)
        in_batch, later = admitted(rig, tokens), admitted(rig, tokens)
        short = admitted(rig, tokens[: 5 * PAGE])  # reads pages that did come
        batch = [in_batch, short]
        with pytest.raises(LoadFailed) as failure:
            rig.read_prefix(short, batch)
        assert failure.value.handles == (in_batch,)
        rig.recover(failure.value)
        with pytest.raises(LoadFailed) as failure:
            rig.read_prefix(later)
        assert (failure.value.handles, failure.value.good_tokens) == ((later,), (6 * PAGE,))
        rig.cache.check()
        rig.recover(failure.value)
        rig.prefill(short)
        rig.cache.close(short, short.prompt, CloseReason.FINISHED)
        rig.settle()
        rig.cache.check()


def test_pages_of_a_failed_load_are_not_given_to_anybody_while_a_request_still_has_them() -> None:
    tokens = prompt(1, 6 * PAGE + 1)
    with Rig(device_pages=12) as rig:
        on_host(rig, tokens)
        fail_load_at(rig, page=0, layer=0)
        first, second = admitted(rig, tokens), admitted(rig, tokens)
        promised = set(second.page_table[:6].tolist())
        with pytest.raises(LoadFailed) as failure:
            rig.read_prefix(first)
        assert set(failure.value.handles) == {first}
        rig.recover(failure.value)
        rig.cache.check()
        other = admitted(rig, prompt(2, 4 * PAGE))
        assert not promised & set(other.page_table.tolist())
        assert not rig.admit(rig.open(prompt(3, 2 * PAGE)))
        rig.cache.close(second, None, CloseReason.ABORTED)
        rig.cache.check()
        assert rig.count("device_pages_free") == 12 - 4
        rig.cache.close(other, None, CloseReason.ABORTED)


def test_a_request_whose_load_failed_gives_nothing_to_the_tree() -> None:
    tokens = prompt(1, 6 * PAGE + 1)
    with Rig() as rig:
        on_host(rig, tokens)
        fail_load_at(rig, page=2, layer=0)
        handle = admitted(rig, tokens)
        with pytest.raises(LoadFailed) as failure:
            rig.read_prefix(handle)
        rig.cache.load_failed(failure.value)
        rig.cache.close(handle, tokens, CloseReason.ABORTED)  # whatever its owner believes it has computed
        rig.cache.check()
        assert rig.check_readable(tokens) == 2
        rig.settle()
        rig.cache.check()


def test_a_load_that_does_not_get_on_is_given_up_and_its_pages_come_back_when_it_ends() -> None:
    tokens = prompt(1, 6 * PAGE + 1)
    with Rig(load_patience_s=0.0) as rig:
        on_host(rig, tokens)
        gate = Gate()
        rig.transfer.before_load = gate.pass_through
        handle = admitted(rig, tokens)
        with pytest.raises(LoadFailed) as failure:
            rig.read_prefix(handle)
        assert failure.value.good_tokens == (0,)
        rig.recover(failure.value)
        rig.cache.check()
        assert rig.count("device_pages_free") == 64 - 6
        assert rig.count("host_frames_quarantined") == 6
        assert not rig.cache.idle()
        again = admitted(rig, tokens)  # nothing of it is left to match, or to wait for
        assert again.cached.total == 0
        rig.prefill(again)
        rig.cache.close(again, tokens, CloseReason.FINISHED)
        gate.opened.set()
        rig.settle()
        rig.cache.check()
        assert rig.count("host_frames_quarantined") == 0
        assert rig.check_readable(tokens) == 6


def test_a_load_below_one_that_failed_comes_back_too() -> None:
    tokens = prompt(1, 10 * PAGE + 1)
    with Rig() as rig:
        on_host(rig, tokens)
        fail_load_at(rig, page=2, layer=0)
        upper = admitted(rig, tokens[: 4 * PAGE + 1])
        lower = admitted(rig, tokens)
        assert (upper.cached.host, lower.cached.device, lower.cached.host) == (4 * PAGE, 4 * PAGE, 6 * PAGE)
        with pytest.raises(LoadFailed) as failure:
            rig.read_prefix(upper, [upper, lower])
        assert dict(zip(failure.value.handles, failure.value.good_tokens, strict=True)) == {
            upper: 2 * PAGE,
            lower: 2 * PAGE,
        }
        rig.recover(failure.value)
        rig.settle()
        rig.cache.check()
        assert rig.count("device_pages_free") + rig.tree.stats().device_pages == 64


def test_pages_below_a_failed_load_wait_for_everybody_who_was_promised_them() -> None:
    tokens = prompt(1, 10 * PAGE + 1)
    with Rig() as rig:
        on_host(rig, tokens)
        rig.transfer.bad_load = lambda pages, at: 2 if at == 0 and len(pages) == 4 else None  # the upper one only
        upper = admitted(rig, tokens[: 4 * PAGE + 1])
        lower = admitted(rig, tokens)
        with pytest.raises(LoadFailed) as failure:
            rig.read_prefix(upper)
        assert failure.value.handles == (upper,)
        rig.recover(failure.value)
        rig.settle()  # the lower load ends well, and its pages are of no use
        rig.cache.check()
        assert rig.count("device_pages_free") == 64 - 11 - rig.tree.stats().device_pages + 2
        rig.cache.close(lower, None, CloseReason.ABORTED)
        rig.cache.check()
        assert rig.count("device_pages_free") == 64 - rig.tree.stats().device_pages


def test_an_aborted_request_leaves_its_load_to_end_by_itself() -> None:
    tokens = prompt(1, 6 * PAGE + 1)
    with Rig(device_pages=8) as rig:
        on_host(rig, tokens)
        gate = Gate()
        rig.transfer.before_load = gate.pass_through
        handle = admitted(rig, tokens)
        rig.cache.gate([handle])
        assert gate.arrived.wait(HANG_S)
        rig.cache.close(handle, None, CloseReason.ABORTED)
        rig.cache.check()
        assert not rig.admit(rig.open(prompt(2, 4 * PAGE)))  # its pages are still being written
        gate.opened.set()
        rig.settle()
        assert rig.check_readable(tokens) == 6
        rig.cache.check()


def test_t05_a_load_that_raises_gives_its_host_pages_back() -> None:
    tokens = prompt(1, 8 * PAGE + 1)
    with Rig(num_host_frames=12) as rig:
        on_host(rig, tokens)

        def explode(layer: int) -> None:
            raise RuntimeError("told to fail")

        rig.transfer.before_load = explode
        handle = admitted(rig, tokens)
        with pytest.raises(LoadFailed) as failure:
            rig.read_prefix(handle)
        assert failure.value.good_tokens == (0,)
        rig.recover(failure.value)
        rig.settle()
        rig.cache.check()  # no lock is left
        rig.transfer.before_load = lambda layer: None
        on_host(rig, tokens)
        assert rig.run(tokens).host == 8 * PAGE  # the thread is alive
