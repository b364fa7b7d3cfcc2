"""A limit by age."""

from __future__ import annotations

from contextlib import closing

import numpy as np
import pytest

from storage_backends.base import (
    Outcome,
)
from storage_backends.layers.expiry import ExpiryLayer
from tests.unit.bounds.media import Medium, bounded, put


class TestExpiry:
    def test_what_is_too_old_is_removed(self, medium: Medium) -> None:
        ids = put(medium, 4, seed=1)
        medium.modified_ns = 1000  # 1000, 1001, 1002, 1003
        with closing(ExpiryLayer(medium, 1e-9 * 100, now_ns=lambda: 1102)) as layer:
            assert layer.sweep() == layer.num_expired == 2
            assert np.count_nonzero(layer.contains(ids) == Outcome.OK) == 2

    def test_what_has_no_age_stays(self, medium: Medium) -> None:
        put(medium, 1, seed=1)
        medium.modified_ns = 0
        with closing(ExpiryLayer(medium, 1e-9, now_ns=lambda: 10**18)) as layer:
            assert layer.sweep() == 0

    def test_a_limit_above_it_learns_of_it(self, medium: Medium) -> None:
        medium.modified_ns = 1000
        bounded_medium = bounded(medium, 8)
        with closing(ExpiryLayer(bounded_medium, 1e-9, now_ns=lambda: 10**9)) as layer:
            put(layer, 3, seed=1)
            assert layer.sweep() == 3
            assert layer.usage().used_bytes == 0

    def test_a_medium_that_knows_no_age_is_refused(self, medium: Medium) -> None:
        with pytest.raises(ValueError, match="memory backend does not say when its pages were written"):
            ExpiryLayer(medium.memory, 3600)

    def test_a_time_to_live_is_positive(self, medium: Medium) -> None:
        with pytest.raises(ValueError, match="ttl_s is 0"):
            ExpiryLayer(medium, 0)
