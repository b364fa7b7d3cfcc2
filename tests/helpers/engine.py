"""An engine's client of a real daemon, with a few pages of its own."""

from __future__ import annotations

import numpy as np

from cachesvc.client.base import AttachRequest
from cachesvc.client.channel import ChannelClient, ChannelClientOptions
from cachesvc.client.connect import dial_socket
from cachesvc.identity import Identity
from tests.helpers.daemon import HANG_S

IDENTITY = Identity(
    model_id="m",
    weights_digest="",
    config_digest="",
    dtype="bfloat16",
    page_size=16,
    num_layers=1,
    num_kv_heads=4,
    head_dim=64,
)
NUM_PAGES = 8


class Engine:
    """A client with a region whose first frames hold pages."""

    def __init__(self, home, group):
        self.client = ChannelClient(dial_socket(home.socket), ChannelClientOptions(call_timeout_s=HANG_S))
        self.region = self.client.attach(AttachRequest(IDENTITY, group, NUM_PAGES, IDENTITY.page_bytes())).region
        self.keys = np.random.default_rng(1).integers(0, 256, (NUM_PAGES, 32), dtype=np.uint8)
        self.frames = np.arange(NUM_PAGES, dtype=np.int32)
        self.depths = np.arange(NUM_PAGES, dtype=np.uint32)

    def write(self):
        self.region.begin_write(self.frames)
        self.region.write_records(self.frames, self.keys, self.depths)
        self.region.data()[:] = np.arange(NUM_PAGES, dtype=np.uint8)[:, None]
        self.region.commit(self.frames)
        self.client.publish(self.frames)
