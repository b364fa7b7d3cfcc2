"""Native result codes as outcomes, by table: one indexing operation per batch."""

from __future__ import annotations

import errno
from collections.abc import Mapping
from typing import Final

import numpy as np
from cachekernels.objects import Admission
from numpy.typing import NDArray

from storage_backends.outcome import Outcome

OutcomeTable = NDArray[np.uint8]


def lookup_table(of: Mapping[int, Outcome]) -> OutcomeTable:
    """uint8[len(of)] for codes 0, 1, 2 ..."""
    return np.array([of[code] for code in range(len(of))], dtype=np.uint8)


ADMISSION_OUTCOMES: Final = lookup_table(
    {
        Admission.GRANTED: Outcome.OK,
        Admission.EXISTS: Outcome.EXISTS,
        Admission.NO_SPACE: Outcome.NO_SPACE,
        Admission.TOO_LARGE: Outcome.TOO_LARGE,
    }
)

PRESENCE_OUTCOMES: Final = lookup_table({False: Outcome.MISS, True: Outcome.OK})
"""By a boolean viewed as uint8: whether the object is there."""

_TRANSIENT = (
    errno.EAGAIN,
    errno.EINTR,
    errno.EMFILE,
    errno.ENFILE,
    errno.ENOMEM,
    errno.ENOBUFS,
    errno.ESTALE,
    errno.EBUSY,
)
_FULL = (errno.ENOSPC, errno.EDQUOT)


def _errno_table() -> OutcomeTable:
    table = np.full(256, Outcome.FAILED, dtype=np.uint8)
    table[0] = Outcome.OK
    table[errno.ENOENT] = Outcome.MISS
    table[errno.EEXIST] = Outcome.EXISTS
    table[errno.EFBIG] = Outcome.TOO_LARGE
    table[errno.ETIMEDOUT] = Outcome.TIMEOUT
    table[list(_TRANSIENT)] = Outcome.UNAVAILABLE
    table[list(_FULL)] = Outcome.NO_SPACE
    return table


ERRNO_OUTCOMES: Final = _errno_table()
"""uint8[256] by errno; everything unknown has failed for good."""
