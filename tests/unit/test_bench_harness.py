"""The bench harness itself: pairing, targets, records."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

import pytest

from bench import harness
from bench.__main__ import _options, _table


def test_paired_interleaves_and_takes_medians() -> None:
    order: list[str] = []
    ticks = itertools.count()
    run = harness.Run(rounds=3, warmups=1, clock=lambda: float(next(ticks)))
    result = run.paired(lambda: order.append("ours"), lambda: order.append("reference"), scale=10.0)
    assert order == ["ours", "reference"] * 4
    assert (result.value, result.reference, result.rounds) == (10.0, 10.0, 3)


def test_the_page_explains_the_columns_in_their_order() -> None:
    page = (Path(__file__).parents[2] / "docs" / "bench.md").read_text()
    explained = re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE)
    table = _table([])
    assert explained == [column.header for column in table.columns]
    assert "docs/bench.md" in str(table.caption)


def test_rate_counts_amount_per_second() -> None:
    ticks = itertools.count(step=2)
    run = harness.Run(rounds=3, clock=lambda: float(next(ticks)))
    assert run.paired_rate(lambda: None, amount=10.0).value == 5.0


@pytest.mark.parametrize(
    ("target", "value", "ratio", "met"),
    [
        ("value<=50", 50.0, None, True),
        ("value<=50", 50.1, None, False),
        ("ratio>=0.8", 1.0, 0.79, False),
        ("ratio>=0.8", 1.0, 0.8, True),
        ("ratio>=0.8", 1.0, None, None),
        ("", 1.0, 1.0, None),
    ],
)
def test_targets(target: str, value: float, ratio: float | None, met: bool | None) -> None:
    assert harness.is_met(target, value, ratio) is met


@pytest.mark.parametrize("target", ["50", "speed>=2", "ratio==1"])
def test_malformed_target_is_refused(target: str) -> None:
    with pytest.raises(ValueError, match="expected value<=N"):
        harness.figure("x.malformed", unit="us", target=target)


def test_a_figure_is_registered_once() -> None:
    harness.figure("test.once", unit="us")(lambda run: run.of([1.0]))
    try:
        with pytest.raises(ValueError, match="registered twice"):
            harness.figure("test.once", unit="us")(lambda run: run.of([1.0]))
    finally:
        del harness.FIGURES["test.once"]


@pytest.mark.parametrize(
    ("argument", "reason"),
    [
        ("ROUNDS=x", "ROUNDS=x is not a number of rounds, 1 or more"),
        ("ROUNDS=0", "ROUNDS=0 is not a number"),
        ("JSON=/no/such/out.json", "there is no folder /no/such"),
        ("ROUND=3", "'ROUND=3' is not one of ONLY=…, JSON=…, ROUNDS=…"),
    ],
)
def test_what_cannot_be_meant_is_said_before_anything_is_measured(argument: str, reason: str) -> None:
    with pytest.raises(SystemExit, match=f"^bench: .*{re.escape(reason)}"):
        _options([argument])


def test_an_option_left_empty_has_its_default() -> None:
    assert _options(["ONLY=", "JSON=out.json", "ROUNDS="]) == {"ONLY": "*", "JSON": "out.json", "ROUNDS": "7"}
