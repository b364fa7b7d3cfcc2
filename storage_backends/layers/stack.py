"""All layers that a medium behind a connection needs, in the one order that works.

DESIGN. From the outside: breaker, limit, deadline, retry, backend.
- The breaker is outermost: while it is open nobody waits for a place or a deadline, and what the limit declines tells
  it nothing.
- The limit stands outside the deadline: waiting for one's turn is not the medium's fault.
- The deadline covers a call with all its retries, so that no call takes longer.
The checksum layer comes on top of these, one per namespace, put there by the node.
"""

from __future__ import annotations

import random as random_numbers
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from storage_backends.base import StorageBackend
from storage_backends.clock import Clock, SystemClock
from storage_backends.errors import StorageConfigError
from storage_backends.layers.breaker import BreakerLayer, BreakerOptions
from storage_backends.layers.deadline import DeadlineLayer
from storage_backends.layers.limit import LimitLayer
from storage_backends.layers.retry import RetryLayer, RetryOptions
from storage_backends.options import check_names, seconds, whole_number


@dataclass(frozen=True)
class LayerOptions:
    """Options under `layers` of any backend.

    deadline_s: no call takes longer once it has begun. attempts: tries of what failed for the moment; 1 tries once.
    max_calls: calls at once; more wait up to deadline_s for their turn and are THROTTLED then. breaker_failures: calls
    failed in a row that open the circuit. breaker_pause_s: how long calls are then declined at once; doubles with every
    probe that fails, up to 30 s.
    """

    deadline_s: float = 5.0
    attempts: int = 3
    max_calls: int = 16
    breaker_failures: int = 5
    breaker_pause_s: float = 1.0

    @staticmethod
    def parse(options: object) -> LayerOptions:
        """From a mapping of option names to values. Raises StorageConfigError."""
        if not isinstance(options, Mapping):
            raise StorageConfigError(f"layers={options!r} is not a table of options")
        check_names("layers", options, LayerOptions.__dataclass_fields__)
        default = LayerOptions()
        return LayerOptions(
            deadline_s=seconds("deadline_s", options.get("deadline_s", default.deadline_s), 0.01, 3600),
            attempts=whole_number("attempts", options.get("attempts", default.attempts), 1, 20),
            max_calls=whole_number("max_calls", options.get("max_calls", default.max_calls), 1, 1024),
            breaker_failures=whole_number(
                "breaker_failures", options.get("breaker_failures", default.breaker_failures), 1, 1000
            ),
            breaker_pause_s=seconds(
                "breaker_pause_s", options.get("breaker_pause_s", default.breaker_pause_s), 0.01, 30
            ),
        )


def in_layers(
    backend: StorageBackend,
    options: LayerOptions,
    clock: Clock | None = None,
    random: Callable[[], float] = random_numbers.random,
) -> StorageBackend:
    """`backend`, which the result owns, behind all layers. random: uniform in [0, 1)."""
    clock = clock or SystemClock()
    retry = RetryOptions(attempts=options.attempts, budget_s=options.deadline_s)
    breaker = BreakerOptions(failures=options.breaker_failures, pause_s=options.breaker_pause_s)
    stack: StorageBackend = RetryLayer(backend, retry, clock, random)
    # As many may hang as run: the limit is not to be had twice over by calls that nobody waits for.
    stack = DeadlineLayer(stack, options.deadline_s, options.max_calls, clock)
    stack = LimitLayer(stack, options.max_calls, options.deadline_s, clock)
    return BreakerLayer(stack, breaker, clock, random)
