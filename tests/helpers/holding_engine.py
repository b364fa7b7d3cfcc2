"""An engine in a process of its own that holds as much as it can: ten pages published, two stored, a read under way.

    python -m tests.helpers.holding_engine SOCKET

Prints a line when all of that has been sent, then waits for whatever becomes of it.
"""

import signal
import sys
from pathlib import Path

import numpy as np

from cachesvc.client.base import AttachRequest
from cachesvc.client.channel import ChannelClient
from cachesvc.client.connect import dial_socket
from tests.oracles.pages import IDENTITY, PAGE_BYTES, chain, depths, page

NUM_FRAMES = 32
PUBLISHED = chain(1, 10)
WANTED = chain(2, 10)


def main() -> None:
    client = ChannelClient(dial_socket(Path(sys.argv[1])))
    region = client.attach(AttachRequest(IDENTITY, "holder", NUM_FRAMES, PAGE_BYTES)).region
    frames = np.arange(10, dtype=np.int32)
    pages = np.stack([page(key) for key in PUBLISHED])
    addresses = np.array([row.ctypes.data for row in pages], np.uint64)
    assert region.write(frames, addresses, PUBLISHED, depths(PUBLISHED)).all()
    client.publish(frames)
    region.begin_write(frames[:1] + 25)
    assert isinstance(client.prefetch(WANTED, frames + 10, depths(WANTED)), int)
    client.counters()  # all that was sent before has been obeyed when this is answered
    print("holding", flush=True)
    signal.pause()


if __name__ == "__main__":
    main()
