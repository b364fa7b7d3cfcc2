"""What stands between SGLang and the node: what it counts and says of calls, verb by verb."""

import random

import numpy as np
import pytest

from engine_plugin.sglang.gate import VERBS, Gate, StoreVerb
from storage_backends.base import Outcome, outcomes


@pytest.fixture
def gate(clock):
    return Gate(dict.fromkeys(StoreVerb, 1.0), clock)


def call(gate, verb, *results):
    return gate.call(verb, len(results), lambda: np.array(results, np.uint8)).tolist()


def said(caplog):
    return [record.getMessage() for record in caplog.records if record.name.startswith("engine_plugin")]


def test_a_call_out_of_time_closes_its_verb_and_no_other(gate, clock):
    assert call(gate, StoreVerb.GET, Outcome.OK, Outcome.TIMEOUT) == [Outcome.OK, Outcome.TIMEOUT]
    assert call(gate, StoreVerb.GET, Outcome.OK) == [Outcome.UNAVAILABLE]
    assert call(gate, StoreVerb.EXISTS, Outcome.OK) == [Outcome.OK]
    clock.advance(1.0)
    assert call(gate, StoreVerb.GET, Outcome.OK) == [Outcome.OK]


def test_one_call_at_a_time_is_let_through_to_try(gate, clock):
    """Half open: what comes meanwhile is answered at once, and a trial that says nothing leaves room for the next."""
    call(gate, StoreVerb.GET, Outcome.TIMEOUT)
    clock.advance(1.0)
    inner = []

    def try_it():
        inner.extend(call(gate, StoreVerb.GET, Outcome.OK))
        return outcomes(1, Outcome.UNAVAILABLE)  # no connection: nothing was tried

    assert gate.call(StoreVerb.GET, 1, try_it).tolist() == [Outcome.UNAVAILABLE]
    assert inner == [Outcome.UNAVAILABLE]
    with pytest.raises(ValueError, match="slots"):
        gate.call(StoreVerb.GET, 1, lambda: (_ for _ in ()).throw(ValueError("slots")))
    assert call(gate, StoreVerb.GET, Outcome.TIMEOUT) == [Outcome.TIMEOUT], "let through"
    clock.advance(1.0)
    assert call(gate, StoreVerb.GET, Outcome.OK) == [Outcome.UNAVAILABLE], "the second pause is longer"
    clock.advance(1.0)
    assert call(gate, StoreVerb.GET, Outcome.OK) == [Outcome.OK]


def test_a_medium_that_hangs_below_a_node_that_answers_is_said_once(gate, clock, caplog):
    for _ in range(50):
        call(gate, StoreVerb.EXISTS, Outcome.OK)
        call(gate, StoreVerb.GET, Outcome.TIMEOUT, Outcome.TIMEOUT)
    assert said(caplog) == ["get: the node does not answer (2 pages): they count as not stored"]
    clock.advance(1.0)
    for _ in range(50):
        call(gate, StoreVerb.GET, Outcome.MISS)
    assert said(caplog)[1:] == ["get: the node answers again"]


def test_every_page_is_counted_by_verb_and_outcome(gate):
    draw = random.Random(1)
    expected = np.zeros((len(VERBS), len(Outcome)), np.int64)
    for _ in range(200):
        verb, outcome = draw.randrange(len(VERBS)), draw.choice([Outcome.OK, Outcome.MISS, Outcome.NO_SPACE])
        call(gate, VERBS[verb], *[outcome] * 3)
        expected[verb, outcome] += 3
    assert (gate.tally() == expected).all()
    assert sum(sum(by_outcome.values()) for by_outcome in gate.counts().values()) == 600
    call(gate, StoreVerb.CLEAR)
    assert (gate.tally() == expected).all(), "a call of no pages"
