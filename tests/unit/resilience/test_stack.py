"""All of these layers over one backend, and their options."""

from __future__ import annotations

import pytest

from storage_backends.base import Outcome
from storage_backends.clock import ManualClock
from storage_backends.errors import (
    StorageConfigError,
    StorageTimeout,
    StorageUnavailable,
)
from storage_backends.layers.fault import Script
from storage_backends.layers.stack import LayerOptions, in_layers
from storage_backends.memory.backend import MemoryBackend
from storage_backends.registry import open_backend
from storage_backends.testing.objects import Buffers, make_ids
from tests.unit.resilience.faults import SIZE, Aside, Hang, faulty


class TestAllLayers:
    def test_a_medium_that_hangs_costs_a_few_deadlines_and_then_nothing(
        self, memory: MemoryBackend, clock: ManualClock, aside: Aside
    ) -> None:
        hangs = [Hang(), Hang()]
        script = Script({"contains": list(hangs)})
        layer = in_layers(faulty(memory, script), LayerOptions(deadline_s=2.0, breaker_failures=2), clock, lambda: 0.0)
        for hang in hangs:
            asking = aside(lambda: layer.contains(make_ids(1)))
            assert hang.entered.wait(60)
            clock.advance(2.0)
            with pytest.raises(StorageTimeout):
                asking.result(60)
        with pytest.raises(StorageUnavailable, match="too many reads failed"):
            layer.contains(make_ids(1))
        assert not layer.is_serving()
        for hang in hangs:
            hang.go_on.set()
        clock.advance(1.0)
        assert layer.contains(make_ids(1)).tolist() == [Outcome.MISS]
        assert layer.is_serving()

    def test_tallies_are_there_from_the_start(self, memory: MemoryBackend) -> None:
        tallies = in_layers(memory, LayerOptions()).tallies()
        assert set(tallies.values()) == {0}
        assert {name.split("_")[0] for name in tallies} == {"breaker", "limit", "deadline", "retry"}
        assert len(tallies) == 15

    def test_bad_arguments_reach_the_backend(self, memory: MemoryBackend) -> None:
        layer = in_layers(memory, LayerOptions())
        with pytest.raises(ValueError, match="segment"):
            layer.get_into(make_ids(1), Buffers.make(2, SIZE).segments())

    def test_options(self) -> None:
        assert LayerOptions.parse({}) == LayerOptions()
        assert LayerOptions.parse({"deadline_s": "0.5", "attempts": 1}).deadline_s == 0.5
        for options, message in (
            ({"deadline": 1}, "'layers' has no option 'deadline'; did you mean 'deadline_s'"),
            ({"deadline_s": "soon"}, "deadline_s='soon' is not a number of seconds"),
            ({"deadline_s": "nan"}, "is not within 0.01 to 3600 seconds"),
            ({"attempts": 0}, "attempts=0 is not within 1 to 20"),
            (5, "layers=5 is not a table"),
        ):
            with pytest.raises(StorageConfigError, match=message):
                LayerOptions.parse(options)

    def test_any_backend_can_be_opened_in_layers(self) -> None:
        plain, layered = open_backend("memory", {}), open_backend("memory", {"layers": {"max_calls": 4}})
        assert plain.tallies() == {}
        assert "breaker_reads_opened" in layered.tallies()
        plain.close()
        layered.close()
