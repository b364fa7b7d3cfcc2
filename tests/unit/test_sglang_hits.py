"""Which prefixes can be restored: the vectors agree with the sentence."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from engine_plugin.sglang.hits import leading, lengths_of, longest, restorable

PRESENCE = st.lists(st.booleans(), max_size=40).map(lambda bits: np.array(bits, np.bool_))


@given(PRESENCE)
def test_a_pool_of_every_page_allows_what_is_there_from_the_start(is_there):
    allowed = restorable(is_there, None)
    assert lengths_of(allowed) == [n for n in range(1, len(is_there) + 1) if is_there[:n].all()]
    assert longest(allowed) == leading(is_there)


@given(PRESENCE, st.integers(1, 50))
def test_a_pool_of_trailing_pages_allows_ends_whose_window_is_there(is_there, trailing):
    allowed = restorable(is_there, trailing)
    lengths = [n for n in range(1, len(is_there) + 1) if is_there[max(0, n - trailing) : n].all()]
    assert lengths_of(allowed) == lengths
    assert longest(allowed) == max(lengths, default=0)


def test_a_state_leaves_holes():
    is_there = np.array([0, 1, 0, 0, 1, 0], np.bool_)
    assert lengths_of(restorable(is_there, 1)) == [2, 5]
    assert all(type(length) is int for length in lengths_of(restorable(is_there, 1)))
