"""A process that stores pages until it is killed: `... -m tests.helpers.storage_writer BACKEND OPTIONS CAPACITY FIRST`.

Pages are those of storage_child, from number FIRST on, in batches; it says the number behind each batch. OPTIONS: JSON.
"""

from __future__ import annotations

import itertools
import json
import sys

from storage_backends.bounds import in_bounds
from storage_backends.layers.checksum import ChecksumLayer
from storage_backends.registry import open_backend
from tests.helpers.storage_child import NAMESPACE, ids_of, pages_of, say

BATCH = 8


def bounded(backend: str, options: dict[str, object], capacity_bytes: int) -> ChecksumLayer:
    """As a node opens it, start-up work done. A backend with a capacity of its own has it among its options."""
    inner = in_bounds(open_backend(backend, options), None if "capacity_bytes" in options else capacity_bytes)
    assert inner.wait_ready(60)
    return ChecksumLayer(inner, NAMESPACE)


def main(backend: str, options: str, capacity_bytes: str, first: str) -> None:
    """Until somebody ends it."""
    opened = bounded(backend, json.loads(options), int(capacity_bytes))
    for begin in itertools.count(int(first), BATCH):
        numbers = list(range(begin, begin + BATCH))
        opened.put_from(ids_of(numbers), pages_of(numbers).segments())
        say(begin + BATCH)


if __name__ == "__main__":
    main(*sys.argv[1:])
