"""Store clients as these tests open them, four pages, and what a get of them is."""

import numpy as np

import cachesvc
from storage_backends.base import Outcome
from tests.helpers.store_user import NAMESPACE, PAGE_BYTES, TENANT, some_keys
from tests.oracles.pages import page

OK, EXISTS, MISS, TIMEOUT, UNAVAILABLE = (
    int(o) for o in (Outcome.OK, Outcome.EXISTS, Outcome.MISS, Outcome.TIMEOUT, Outcome.UNAVAILABLE)
)
FRAMES = 8
KEYS = some_keys(4)
PAGES = np.stack([page(key, PAGE_BYTES) for key in KEYS])


def opened(path, **changes):
    wanted = {"tenant": TENANT, "namespace": NAMESPACE, "page_bytes": PAGE_BYTES, "memory_bytes": FRAMES * PAGE_BYTES}
    return cachesvc.connect_store(f"unix://{path}", **{**wanted, **changes})


def got(store, **options):
    out = np.zeros_like(PAGES)
    results = store.get(KEYS, out, **options)
    assert (out[results == Outcome.OK] == PAGES[results == Outcome.OK]).all(), "wrong bytes"
    return results.tolist()


def again(store):
    """Lets the store try at once, instead of when its pause is over."""
    store._connection._retry_at_s = 0.0
