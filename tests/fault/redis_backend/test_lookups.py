"""Long lookups: each page is told, and neighbours are asked about together."""

from __future__ import annotations

from contextlib import closing

import numpy as np
import pytest

from storage_backends.base import Outcome
from storage_backends.registry import open_backend
from storage_backends.testing.objects import Buffers, make_ids
from tests.helpers.redis_servers import PASSWORD, USER, Server, fresh_prefix


@pytest.mark.parametrize("stored", ["none", "all", "a prefix", "every other", "one of the last group"])
def test_a_long_lookup_tells_each_page(valkey_server: Server, stored: str) -> None:
    """Neighbours are asked about together; what is not the same for all of them, one by one."""
    ids = make_ids(203)
    which = {
        "none": np.zeros(203, np.bool_),
        "all": np.ones(203, np.bool_),
        "a prefix": np.arange(203) < 77,
        "every other": np.arange(203) % 2 == 0,
        "one of the last group": np.arange(203) == 202,
    }[stored]
    with closing(open_backend("redis", {"url": valkey_server.unix_url, "prefix": fresh_prefix()})) as backend:
        own = ids[which].copy()
        if len(own):
            backend.put_from(own, Buffers.make(len(own), 64, 1).segments())
        assert backend.contains(ids).tolist() == np.where(which, Outcome.OK, Outcome.MISS).tolist()


def test_a_long_lookup_is_few_commands(own_server: Server) -> None:
    """One for 32 neighbours, and 32 more where a prefix ends."""
    url = f"redis://{USER}:{PASSWORD.replace('/', '%2F')}@127.0.0.1:{own_server.port}/2"
    ids = make_ids(320)
    with closing(open_backend("redis", {"url": url})) as backend, own_server.client() as client:
        backend.put_from(ids[:40].copy(), Buffers.make(40, 64, 1).segments())
        client.config_resetstat()
        backend.contains(ids)
        assert client.info("commandstats")["cmdstat_exists"]["calls"] == 10 + 32
