"""Engines that attach, end and come again, and what the node has of them."""

import os
from dataclasses import replace

import numpy as np
from cachekernels.region import Region, Side

from cachesvc.client.base import AttachRequest
from storage_backends.base import Outcome
from tests.oracles.pages import IDENTITY, Engine, chain, run_all

KEEP_S = 300.0
KEYS = chain(1, 4)
FRAMES = np.arange(4, dtype=np.int32)
OTHER = replace(IDENTITY, weights_digest="r2")


class Process:
    """What makes an engine's process: it maps the region and holds it until it dies."""

    def __init__(self, engine):
        self.region = Region.open(engine.region.data_fd, engine.region.directory_fd)
        self.region.hold(Side.ENGINE)

    def die(self):
        self.region.close()


def filled(node, group="a", keys=KEYS, **options):
    engine = Engine(node, group, 8, **options)
    engine.fill(keys, FRAMES)
    return engine


def session_of(engine):
    return engine.client._session


def lose(node, engine):
    node.lost(session_of(engine))


def attach(node, group="a", identity=IDENTITY, num_frames=8, **more):
    return node.attach(AttachRequest(identity, group, num_frames, identity.page_bytes(), **more))


def states(node):
    snapshot = node.registry.snapshot()
    return [int(snapshot[f'cachesvc_regions{{state="{state}"}}']) for state in ("attached", "lost", "kept")]


def found_by_another(node, keys=KEYS):
    stranger = Engine(node, f"stranger {os.urandom(4).hex()}", 8)
    op = stranger.prefetch(keys, FRAMES)
    run_all(node)
    stranger.poll()
    if stranger.ends[op] == "completed":
        stranger.check_pages(keys, FRAMES)
    num_found = int((stranger.outcomes[op] == Outcome.OK).sum())
    stranger.client.detach()
    node._parts.kept.drop(node._parts.kept.take_region(stranger.region), "expired")
    return num_found
