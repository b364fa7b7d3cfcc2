"""A writer is killed in the middle of its puts, again and again: what is there then is whole, counted, and no more than
may be."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import uuid
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from storage_backends.base import Outcome, StorageBackend
from storage_backends.fsspec.backend import open_backend as fsspec_backend
from tests.helpers import storage_writer
from tests.helpers.redis_servers import Server, fresh_prefix
from tests.helpers.seaweed import BUCKET, Seaweed
from tests.helpers.storage_child import PAGE_BYTES, ids_of, pages_of
from tests.helpers.storage_writer import BATCH, bounded

REPOSITORY = Path(__file__).parents[2]
NUM_KILLS = 4
NUM_BATCHES = 6
"""Before each kill, as many as fill the room and more."""
CAPACITY = 40 * (PAGE_BYTES + 128)
Medium = tuple[str, dict[str, object]]


@pytest.fixture(params=["file", "fsspec", "nixl", "s3", "redis", "redis cluster"])
def medium(request: pytest.FixtureRequest, tmp_path: Path) -> Medium:
    """A backend and its options; whoever opens them meets the same objects."""
    if request.param in ("file", "nixl"):
        return request.param, {"path": str(tmp_path / "pages"), "capacity_bytes": 40 * (PAGE_BYTES + 4096)}
    if request.param == "fsspec":
        return "fsspec", {"url": f"file://{tmp_path}/pages"}
    if request.param == "s3":
        server: Seaweed = request.getfixturevalue("seaweed")
        return "s3", {**server.options, "prefix": f"{uuid.uuid4().hex}/", "layers": {"deadline_s": 30}}
    options: dict[str, object] = {"prefix": fresh_prefix(), "layers": {"deadline_s": 30}}
    if request.param == "redis":
        return "redis", {**options, "url": request.getfixturevalue("valkey_server").unix_url}
    members: list[Server] = request.getfixturevalue("valkey_cluster")
    return "redis", {**options, "url": ",".join(member.tcp_url for member in members), "cluster": True}


def write_and_die(medium: Medium, first: int) -> int:
    """Returns a number above all that it may have begun to store."""
    backend, options = medium
    command = [sys.executable, "-m", storage_writer.__name__, backend, json.dumps(options), str(CAPACITY), str(first)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    with subprocess.Popen(command, cwd=REPOSITORY, env=environment, stdout=subprocess.PIPE) as writer:
        assert writer.stdout is not None
        said = [int(writer.stdout.readline()) for _ in range(NUM_BATCHES)]
        writer.kill()
        rest = writer.stdout.read().split()
    return max(said[-1], *(int(number) for number in rest), 0) + BATCH


def test_what_is_left_is_whole_and_counted(medium: Medium) -> None:
    end = 0
    for _ in range(NUM_KILLS):
        end = write_and_die(medium, end)
    with closing(bounded(*medium, CAPACITY)) as backend:
        numbers = list(range(end))
        target = pages_of(numbers)
        expected = target.rows.copy()
        target.rows[:] = 0
        found = backend.get_into(ids_of(numbers), target.segments())
        assert set(found.tolist()) == {Outcome.OK, Outcome.MISS}
        hits = found == Outcome.OK
        assert np.array_equal(target.rows[hits], expected[hits])
        check_room(backend, int(hits.sum()))


def check_room(backend: StorageBackend, num_hits: int) -> None:
    usage = backend.usage()
    listed = [batch.lengths for batch in backend.scan()]
    assert sum(map(len, listed)) == usage.objects == num_hits >= 40 - 2 * BATCH
    assert usage.reserved_bytes == 0
    assert sum(int(lengths.sum()) for lengths in listed) == usage.used_bytes <= usage.capacity_bytes


def test_what_is_not_visible_yet_does_not_stay(medium: Medium, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    """Removed by whoever starts next, or going away by itself."""
    backend, options = medium
    write_and_die(medium, 0)
    with closing(bounded(*medium, CAPACITY)):
        if backend in ("file", "nixl"):
            assert not list(tmp_path.glob("pages/??/*.tmp"))
        elif backend == "fsspec":
            left = list(tmp_path.glob("pages/??/*.tmp"))
            assert len(left) <= 8, "one for each thread"
            for path in left:
                os.utime(path, (0, 1))
            with closing(fsspec_backend(options)) as another:
                assert sum(len(batch.ids) for batch in another.scan())
            assert not list(tmp_path.glob("pages/??/*.tmp"))
        elif backend == "redis":
            servers = "valkey_cluster" if "cluster" in options else "valkey_server"
            found = request.getfixturevalue(servers)
            for server in found if isinstance(found, list) else [found]:
                with server.client() as client:
                    for key in client.scan_iter(f"{options['prefix']}*"):
                        is_temporary = key.count(b":") == 2
                        assert (0 < client.pttl(key) <= 60_000) == is_temporary
        else:
            client = request.getfixturevalue("seaweed").client
            keys = [one["Key"] for one in client.list_objects_v2(Bucket=BUCKET, Prefix=options["prefix"])["Contents"]]
            assert all(key.endswith(".page") for key in keys)
