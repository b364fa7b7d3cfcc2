"""A prefix that does not arrive from the host: the requests that wanted it compute it, everybody's tokens are right."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import pytest

from engine_plugin.hicache.config import CacheMode
from engine_plugin.memory.transfer import RegionTransfer
from tests.helpers.subjects import PAGE_SIZE, build
from tests.oracles.token_model import expected_output
from tests.unit.scheduling import Engine, settle

PROMPT = [7 * number % 800 for number in range(41)]
OTHER = [11 * number % 800 for number in range(92)]


@pytest.fixture
def run() -> Iterator[Engine]:
    """An engine whose host tier holds PROMPT's pages and whose device does not."""
    subject = build(
        CacheMode.HIERARCHICAL, num_host_frames=48, load_back_threshold_tokens=1, prefetch_threshold_tokens=4
    )
    engine = subject.engine(chunk_tokens=64)
    for tokens in (PROMPT, OTHER):
        engine.add(tokens, 4)
        engine.run()
        settle(subject.cache)
    yield engine
    assert subject.cache.shutdown(5.0) == 0


def fail_loads(monkeypatch: pytest.MonkeyPatch, answer: Callable[[int], int], at_layer: int) -> list[int]:
    """The next load stops at that layer with `answer(pages)` good ones; the rest of its pages are left as garbage."""
    real, failures = RegionTransfer.load_layer, []

    def load_layer(
        self: RegionTransfer, pages: np.ndarray, frames: np.ndarray, generations: np.ndarray, layer: int
    ) -> int:
        good = real(self, pages, frames, generations, layer)
        if failures or layer != at_layer:
            return good
        failures.append(layer)
        return answer(len(pages))

    monkeypatch.setattr(RegionTransfer, "load_layer", load_layer)
    return failures


def broken(num_pages: int) -> int:
    raise OSError("the copy broke")


@pytest.mark.parametrize("layer", [0, 1, 2])
@pytest.mark.parametrize("answer", [lambda pages: 0, lambda pages: 6, broken], ids=["none", "some", "raises"])
def test_the_good_part_is_kept_and_the_rest_computed(
    run: Engine, monkeypatch: pytest.MonkeyPatch, layer: int, answer: Callable[[int], int]
) -> None:
    failures = fail_loads(monkeypatch, answer, layer)
    request = run.add(PROMPT, 4)
    run.run()
    assert failures == [layer]
    assert run.scheduler.counts.load_failures == 1
    assert run.tokens["r2"] == expected_output(PROMPT, 4)
    assert request.cached.total <= 6 * PAGE_SIZE
    settle(run.cache)
    run.assert_empty()


def test_requests_that_share_a_failed_load_are_all_right(run: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    failures = fail_loads(monkeypatch, lambda pages: 3, at_layer=1)
    for tail in ([1], [2], [3, 4]):
        run.add([*PROMPT, *tail], 3)
    run.run()
    assert failures == [1]
    assert run.scheduler.counts.load_failures >= 1
    for number, tail in enumerate(([1], [2], [3, 4])):
        assert run.tokens[f"r{number + 2}"] == expected_output([*PROMPT, *tail], 3)
    settle(run.cache)
    run.assert_empty()


def test_an_abort_while_its_load_is_under_way_gives_everything_back(run: Engine) -> None:
    run.add(PROMPT, 4)
    request = run.scheduler.waiting[0]
    assert request.handle is not None
    while not run.cache.ready(request.handle):
        run.cache.poll()
    assert run.cache.admit(request.handle, len(PROMPT))
    assert request.handle.cached.host > 0
    run.scheduler.abort(lambda one: True, "the client went away")
    run.cache.check()
    settle(run.cache)
    run.assert_empty()
