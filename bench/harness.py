"""The bench harness: every figure is measured against a reference in the same run.

Machines are shared and noisy, so ours and the reference run interleaved (ours, reference, ours, ...) and medians are
compared. A figure records its numbers and whether its target was met; it gates nothing.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field


@dataclass(frozen=True)
class Measurement:
    """Medians of one figure.

    Attributes:
        value: ours, in the figure's unit.
        reference: the reference in the same unit; None when the target is absolute and there is nothing to pair with.
        spread: (maximum - minimum) / median of ours over the rounds.
        rounds: how often each side ran.
        note: anything a reader needs to judge the number.
    """

    value: float
    reference: float | None
    spread: float
    rounds: int
    note: str = ""


@dataclass(frozen=True)
class Run:
    """What a figure may ask of the harness."""

    rounds: int = 7
    warmups: int = 1
    clock: Callable[[], float] = time.perf_counter

    def paired(
        self,
        ours: Callable[[], object],
        reference: Callable[[], object] | None = None,
        *,
        scale: float = 1.0,
        calls: int = 1,
        rounds: int | None = None,
        note: str = "",
    ) -> Measurement:
        """Median seconds per call times `scale` (1e6 for µs); `calls` is how many operations one invocation does."""
        mine, theirs = self._times(ours, reference, rounds)
        per = scale / calls
        return self.of([t * per for t in mine], [t * per for t in theirs] or None, note=note)

    def paired_rate(
        self,
        ours: Callable[[], object],
        reference: Callable[[], object] | None = None,
        *,
        amount: float,
        scale: float = 1.0,
        rounds: int | None = None,
        note: str = "",
    ) -> Measurement:
        """Median of `amount / seconds * scale` (amount in bytes and scale 1e-9 for GB/s)."""
        mine, theirs = self._times(ours, reference, rounds)
        return self.of([amount / t * scale for t in mine], [amount / t * scale for t in theirs] or None, note=note)

    def of(self, values: list[float], reference: list[float] | None = None, *, note: str = "") -> Measurement:
        """A measurement from samples taken by the figure itself (already in the figure's unit)."""
        median = statistics.median(values)
        spread = (max(values) - min(values)) / median if median else 0.0
        return Measurement(median, statistics.median(reference) if reference else None, spread, len(values), note)

    def _times(
        self, ours: Callable[[], object], reference: Callable[[], object] | None, rounds: int | None
    ) -> tuple[list[float], list[float]]:
        mine: list[float] = []
        theirs: list[float] = []
        for number in range(self.warmups + (rounds or self.rounds)):
            took = self._time(ours)
            other = self._time(reference) if reference is not None else None
            if number >= self.warmups:
                mine.append(took)
                if other is not None:
                    theirs.append(other)
        return mine, theirs

    def _time(self, call: Callable[[], object]) -> float:
        start = self.clock()
        call()
        return self.clock() - start


@dataclass(frozen=True)
class Figure:
    """One named figure: `target` is `value<=50`, `value>=20000`, `ratio>=0.8`, `ratio<=0.05` or empty (informative)."""

    name: str
    unit: str
    target: str
    reference: str
    function: Callable[[Run], Measurement] = field(compare=False)


@dataclass(frozen=True)
class Record:
    """What `JSON=` writes for one figure; ratio = value / reference."""

    name: str
    value: float
    unit: str
    reference: float | None
    reference_name: str
    ratio: float | None
    target: str
    met: bool | None
    spread: float
    rounds: int
    note: str

    def as_dict(self) -> dict[str, object]:
        return asdict(self)


FIGURES: dict[str, Figure] = {}


def figure(
    name: str, *, unit: str, target: str = "", reference: str = ""
) -> Callable[[Callable[[Run], Measurement]], Callable[[Run], Measurement]]:
    """Registers a figure. Names are unique; a malformed target raises at import."""
    if target:
        parse_target(target)

    def register(function: Callable[[Run], Measurement]) -> Callable[[Run], Measurement]:
        if name in FIGURES:
            raise ValueError(f"figure {name!r} is registered twice")
        FIGURES[name] = Figure(name, unit, target, reference, function)
        return function

    return register


def parse_target(target: str) -> tuple[str, str, float]:
    """`ratio>=0.8` -> ("ratio", ">=", 0.8)."""
    for operator in ("<=", ">="):
        what, found, bound = target.partition(operator)
        if found and what in ("value", "ratio"):
            return what, operator, float(bound)
    raise ValueError(f"target {target!r}: expected value<=N, value>=N, ratio<=N or ratio>=N")


def is_met(target: str, value: float, ratio: float | None) -> bool | None:
    """None when there is no target, or when the target needs a ratio and there is none."""
    if not target:
        return None
    what, operator, bound = parse_target(target)
    actual = value if what == "value" else ratio
    if actual is None:
        return None
    return actual <= bound if operator == "<=" else actual >= bound


def measure(chosen: Figure, run: Run) -> Record:
    """Runs one figure."""
    result = chosen.function(run)
    ratio = result.value / result.reference if result.reference else None
    return Record(
        name=chosen.name,
        value=result.value,
        unit=chosen.unit,
        reference=result.reference,
        reference_name=chosen.reference,
        ratio=ratio,
        target=chosen.target,
        met=is_met(chosen.target, result.value, ratio),
        spread=result.spread,
        rounds=result.rounds,
        note=result.note,
    )
