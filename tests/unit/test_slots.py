"""Slot states: all or nothing, lowest first, and no slot twice."""

from __future__ import annotations

import random

import numpy as np
import pytest
from cachekernels.slots import FREE, LENT, QUARANTINED, USED, DoubleFree, SlotStates, StateError

from tests.oracles.slot_states import SlotStates as Oracle


def slots(*numbers: int) -> np.ndarray:
    return np.array(numbers, dtype=np.int32)


def test_allocates_the_lowest_free_slots() -> None:
    states = SlotStates(200)
    assert list(states.alloc(130)) == list(range(130))
    states.move(slots(3, 64, 7), USED, FREE)
    assert list(states.alloc(5, LENT)) == [3, 7, 64, 130, 131]
    assert (states.count(FREE), states.count(USED), states.count(LENT)) == (68, 127, 5)


def test_takes_nothing_when_too_few_are_free() -> None:
    states = SlotStates(4)
    assert states.alloc(5) is None
    assert states.count(FREE) == 4
    assert list(states.alloc(4)) == [0, 1, 2, 3]
    assert states.alloc(1) is None
    assert list(states.alloc(0)) == []


@pytest.mark.parametrize(
    ("moved", "source", "target", "error"),
    [
        ((0, 5), USED, FREE, DoubleFree),  # 5 is free already
        ((0, 1, 0), USED, FREE, DoubleFree),  # 0 twice
        ((0, 1, 0), USED, LENT, StateError),
        ((0, 2), USED, FREE, StateError),  # 2 is lent: not ours to free
        ((0, 2), USED, LENT, StateError),
    ],
)
def test_a_wrong_move_raises_and_moves_nothing(
    moved: tuple[int, ...], source: int, target: int, error: type[Exception]
) -> None:
    states = SlotStates(8)
    states.alloc(3)
    states.move(slots(2), USED, LENT)
    before = states.states()
    with pytest.raises(error) as raised:
        states.move(slots(*moved), source, target)
    assert type(raised.value) is error
    assert np.array_equal(states.states(), before)
    assert states.count(USED) == 2


def test_free_never_exceeds_the_capacity() -> None:
    states = SlotStates(8)
    states.move(states.alloc(8), USED, FREE)
    with pytest.raises(DoubleFree):
        states.move(slots(0), USED, FREE)
    assert states.count(FREE) == 8


def test_bad_arguments_are_named() -> None:
    states = SlotStates(8)
    with pytest.raises(ValueError, match=r"slot 8 is not in \[0, 8\)"):
        states.move(slots(8), USED, FREE)
    with pytest.raises(ValueError, match="slot -1"):
        states.move(slots(-1), USED, FREE)
    with pytest.raises(ValueError, match="state"):
        states.count(4)
    with pytest.raises(ValueError, match="FREE"):
        states.alloc(1, FREE)
    with pytest.raises(TypeError, match="int32"):
        states.move(np.array([1], dtype=np.int64), USED, FREE)  # type: ignore[arg-type]


@pytest.mark.parametrize("seed", range(4))
def test_answers_like_the_oracle(seed: int) -> None:
    rng = random.Random(seed)
    num_slots = rng.choice([1, 63, 64, 65, 130])
    native, oracle = SlotStates(num_slots), Oracle(num_slots)
    for _ in range(400):
        if rng.random() < 0.5:
            n, state = rng.randint(0, num_slots // 2 + 1), rng.choice([USED, LENT, QUARANTINED])
            ours, theirs = native.alloc(n, state), oracle.alloc(n, state)
            assert (ours is None) == (theirs is None)
            assert ours is None or np.array_equal(ours, theirs)
        else:
            source, target = rng.randrange(4), rng.randrange(4)
            held = np.flatnonzero(native.states() == source)
            chosen = slots(*rng.choices(list(held), k=rng.randint(0, 3))) if len(held) else slots(0)
            ours, theirs = (_outcome(each, chosen, source, target) for each in (native, oracle))
            assert ours is theirs
        assert np.array_equal(native.states(), oracle.states())
        assert sum(native.count(state) for state in range(4)) == num_slots


def _outcome(states: SlotStates | Oracle, moved: np.ndarray, source: int, target: int) -> type[Exception] | None:
    try:
        states.move(moved, source, target)
    except StateError as error:
        return type(error)
    return None
