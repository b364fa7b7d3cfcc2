"""A store client that puts, gets and deletes pages at random: `python -m tests.helpers.store_player SOCKET SEED`.

The bytes of a page follow from its key, and whatever it gets is compared. It says "." after each call and ends, with
status 1, at the first wrong byte; otherwise when stdin ends.
"""

import random
import select
import sys

import numpy as np

import cachesvc
from tests.helpers.store_user import NAMESPACE, TENANT, some_keys
from tests.oracles.pages import page

PAGE_BYTES = 32768
NUM_KEYS = 48
MEMORY_BYTES = 24 * PAGE_BYTES


def main() -> None:
    path, seed = sys.argv[1], int(sys.argv[2])
    choose = random.Random(seed)
    keys = some_keys(NUM_KEYS)
    pages = np.stack([page(key, PAGE_BYTES) for key in keys])
    store = cachesvc.connect_store(
        f"unix://{path}", tenant=TENANT, namespace=NAMESPACE, page_bytes=PAGE_BYTES, memory_bytes=MEMORY_BYTES
    )
    while not select.select([sys.stdin], [], [], 0)[0]:
        which = np.array(choose.sample(range(NUM_KEYS), choose.randint(1, 12)))
        match choose.choice(["put", "put", "get", "get", "get", "contains", "delete"]):
            case "put":
                store.put(keys[which], pages[which])
            case "get":
                out = np.zeros((len(which), PAGE_BYTES), np.uint8)
                is_there = store.get(keys[which], out) == cachesvc.Outcome.OK
                assert (out[is_there] == pages[which[is_there]]).all(), "wrong bytes"
            case "contains":
                store.contains(keys[which])
            case "delete":
                store.delete(keys[which[:2]])
        sys.stdout.write(".")
        sys.stdout.flush()
    store.close()


if __name__ == "__main__":
    main()
