"""A store client that dies in the middle of a call: `python -m tests.helpers.store_child SOCKET PAGE_BYTES SEED STEP`.

Steps: "reserved", "begun" (odd, half of the bytes), "written" (even, not committed), "found" (holds what it found),
"stopped" (as written, but it stops instead of dying). It kills or stops itself.
"""

import os
import signal
import sys
import time
from pathlib import Path

import numpy as np

from cachesvc.client.connect import dial_socket
from cachesvc.client.store_link import open_link
from cachesvc.identity import store_keys
from cachesvc.rpc import managed_pb2
from cachesvc.rpc.codec import frames_of
from tests.helpers.store_user import NAMESPACE, TENANT, positions, request, row_addresses, some_keys
from tests.oracles.pages import HANG_S, page

NUM_PAGES = 3


def main() -> None:
    path, page_bytes, seed, step = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
    link = open_link(dial_socket(path), request(page_bytes=page_bytes, frames=8), b"", HANG_S)
    keys = some_keys(NUM_PAGES, seed)
    asked = {"keys": keys.tobytes(), "depths": positions(NUM_PAGES).tobytes()}
    deadline_s = time.monotonic() + HANG_S
    if step == "found":
        found = link.ask(managed_pb2.ToStore(get=managed_pb2.Get(**asked)), deadline_s).found
        assert len(frames_of(found.frames)) == NUM_PAGES
        os.kill(os.getpid(), signal.SIGKILL)
    reserved = link.ask(managed_pb2.ToStore(reserve=managed_pb2.Reserve(**asked)), deadline_s).reserved
    frames = frames_of(reserved.frames)
    assert len(frames) == NUM_PAGES
    if step == "begun":
        link.region.begin_write(frames)
        link.region.data()[frames, : page_bytes // 2] = 7
    if step in ("written", "stopped"):
        pages = np.stack([page(key, page_bytes) for key in keys])
        link.region.write(
            frames, row_addresses(pages), store_keys(TENANT, NAMESPACE, page_bytes, keys), positions(NUM_PAGES)
        )
    os.kill(os.getpid(), signal.SIGSTOP if step == "stopped" else signal.SIGKILL)


if __name__ == "__main__":
    main()
