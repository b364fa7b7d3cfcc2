"""Outcomes of pages as Prometheus series of SGLang's process."""

import numpy as np
import pytest
from prometheus_client import REGISTRY

from engine_plugin.sglang.gate import VERBS, StoreVerb
from engine_plugin.sglang.linker_core import OF_LINKER, Refusal, Refused
from engine_plugin.sglang.metrics import NAME, PageSeries
from storage_backends.base import Outcome


def value(verb, outcome, rank):
    labels = {"tp_rank": rank, "verb": verb, "outcome": outcome}
    return REGISTRY.get_sample_value(f"{NAME}_total", labels)


def tally(**pages):
    """verb_outcome=pages."""
    counts = np.zeros((len(VERBS), len(Outcome)), np.int64)
    for name, number in pages.items():
        verb, _, outcome = name.partition("_")
        counts[VERBS.index(StoreVerb(verb)), Outcome[outcome.upper()]] = number
    return counts


def test_what_the_linker_refuses_stands_in_the_same_series(rank):
    series = PageSeries({"tp_rank": rank}, OF_LINKER)
    refused = Refused()
    for number, reason in enumerate(Refusal, 1):
        assert value(*OF_LINKER[-number], rank) == 0
        refused.add(reason, number)
    series.observe(np.concatenate([tally(put_ok=7).ravel(), refused.tally()]))
    assert value("put", "ok", rank) == 7
    assert value("lookup", "hold_expired", rank) == 2
    assert value("load", "not_held", rank) == 4
    assert value("offload", "offload_failed", rank) == 9
    names = [outcome for _, outcome in OF_LINKER[-len(Refusal) :]]
    assert names == [str(reason) for reason in Refusal], "in the order in which they are counted"


@pytest.fixture
def rank(request):
    return request.node.name


def test_every_series_is_there_from_the_start(rank):
    PageSeries({"tp_rank": rank})
    for verb in VERBS:
        for outcome in Outcome:
            assert value(str(verb), outcome.name.lower(), rank) == 0


def test_what_was_counted_since_is_added(rank):
    series = PageSeries({"tp_rank": rank})
    for seen in (tally(get_ok=3, put_no_space=5), tally(get_ok=3, put_no_space=5), tally(get_ok=7, put_no_space=5)):
        series.observe(seen)
    assert value("get", "ok", rank) == 7
    assert value("put", "no_space", rank) == 5


def test_a_storage_that_is_attached_again_goes_on_counting(rank):
    for _ in range(2):
        PageSeries({"tp_rank": rank}).observe(tally(exists_miss=4))
    assert value("exists", "miss", rank) == 8
