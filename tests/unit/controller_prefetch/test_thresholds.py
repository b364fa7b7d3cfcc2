"""When it is worth asking for what a prompt misses."""

from __future__ import annotations

from dataclasses import replace

import pytest

from storage_backends.memory.backend import open_backend
from tests.helpers.caches import CONFIG, PAGE, prompt
from tests.helpers.stored_prompts import stored
from tests.oracles.pages import ScriptedBackend
from tests.unit.controller_prefetch.rigs import TOKENS, new_rig


@pytest.mark.parametrize(
    ("num_tokens", "threshold", "end"),
    [
        (7 * PAGE, 7 * PAGE, "below_threshold"),  # 6 whole pages may be cached
        (7 * PAGE + 1, 7 * PAGE, "complete"),
        (12 * PAGE + 1, 7 * PAGE, "complete"),
    ],
)
def test_too_few_missing_tokens_are_not_asked_for(
    backend: ScriptedBackend, num_tokens: int, threshold: int, end: str
) -> None:
    with new_rig(backend, prefetch_threshold_tokens=threshold) as rig:
        cached = rig.run(TOKENS[:num_tokens])
        assert rig.prefetch_ends() == {end: 1}
        assert (backend.calls["get"] > 0) == (end == "complete")
        assert cached.storage == (0 if end == "below_threshold" else (num_tokens - 1) // PAGE * PAGE)


def test_what_the_tree_has_does_not_count_as_missing(backend: ScriptedBackend) -> None:
    with new_rig(backend, prefetch_threshold_tokens=7 * PAGE) as rig:
        rig.run(TOKENS[: 6 * PAGE])
        rig.run(TOKENS)
        assert rig.prefetch_ends() == {"below_threshold": 2}


def test_a_hit_below_the_threshold_takes_no_frame() -> None:
    backend = ScriptedBackend(stored(open_backend({}), TOKENS[: 5 * PAGE]))
    with new_rig(backend, prefetch_threshold_tokens=6 * PAGE) as rig:
        assert rig.run(TOKENS).total == 0
        assert rig.prefetch_ends() == {"hit_below_threshold": 1}
        assert backend.calls["get"] == 0


def test_a_miss_is_a_miss(backend: ScriptedBackend) -> None:
    with new_rig(backend) as rig:
        assert rig.run(prompt(2, 50)).total == 0
        assert rig.prefetch_ends() == {"miss": 1}


@pytest.mark.parametrize("threshold", [0, 1, PAGE - 1, PAGE])
def test_a_threshold_below_a_page_is_one_page_and_no_less(backend: ScriptedBackend, threshold: int) -> None:
    """What is missing is whole pages, so that no value has to be changed for it to have its meaning."""
    with new_rig(backend, prefetch_threshold_tokens=threshold) as rig:
        assert rig.run(TOKENS[: PAGE + 1]).storage == PAGE
        assert rig.run(prompt(2, PAGE)).total == 0
        assert rig.prefetch_ends() == {"complete": 1, "below_threshold": 1}


def test_thresholds_are_at_least_a_page() -> None:
    small = replace(CONFIG, prefetch_threshold_tokens=1)
    with new_rig(open_backend({}), config=small) as rig:
        rig.run(prompt(1, PAGE))
        assert rig.prefetch_ends() == {"below_threshold": 1}
