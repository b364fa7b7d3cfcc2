"""Clients that are killed or stopped in the middle of a call, or that fork."""

import os
import signal
import subprocess
import sys

import pytest
from cachekernels.region import Side

from tests.fault.store.clients import KEYS, MISS, OK, PAGES, got, opened
from tests.helpers.node_process import ROOT
from tests.helpers.store_user import PAGE_BYTES, some_keys


def child(path, step, seed=7):
    arguments = [str(path), str(PAGE_BYTES), str(seed), step]
    return subprocess.Popen([sys.executable, "-m", "tests.helpers.store_child", *arguments], cwd=ROOT)


@pytest.mark.parametrize("step", ["reserved", "begun", "written"])
def test_a_client_killed_in_mid_put_leaves_nothing(node, door, step):
    with opened(door.path) as store:
        store.put(KEYS, PAGES)
        assert child(door.path, step).wait() == -signal.SIGKILL
        slab = node.managed.slabs()[0]
        door.until(lambda: node.managed.num_sessions() == 1)
        node.tick()
        counts = slab.counts()
        assert counts["quarantined"] == counts["writing"] == 0
        assert store.contains(some_keys(3, 7)).tolist() == [MISS] * 3
        assert got(store) == [OK] * 4
        assert store.put(some_keys(4, 8), PAGES).tolist() == [OK] * 4


def test_a_client_killed_with_a_reference_releases_it(node, door):
    with opened(door.path) as store:
        keys = some_keys(3, 7)
        store.put(keys, PAGES[:3])
        assert child(door.path, "found").wait() == -signal.SIGKILL
        door.until(lambda: node.managed.num_sessions() == 1)
        door.until(lambda: node.managed.slabs()[0].counts()["held"] == 0)  # those that wait for storage have their own


def test_what_a_stopped_client_may_still_write_is_not_used_until_it_is_dead(node, door):
    process = child(door.path, "stopped")
    os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
    slab = node.managed.slabs()[0]
    session = next(iter(node.managed._sessions.values()))
    door.loop.call_soon_threadsafe(lambda: [c.abort() for c in list(door.door._desk.connections.values())])
    door.until(lambda: not node.managed.num_sessions())
    assert session.is_ended
    node.tick()
    assert slab.counts()["quarantined"] == 3
    process.kill()
    process.wait()
    node.tick()
    assert slab.counts()["quarantined"] == 0


def test_a_client_holds_its_slab_as_long_as_it_may_write_there(node, door):
    """The node proves by this lock that one which it cannot see writes no more."""
    with opened(door.path) as store:
        assert store.contains(KEYS).tolist() == [MISS] * 4
        (slab,) = node.managed.slabs()
        assert slab.region.is_held(Side.ENGINE)
    assert not slab.region.is_held(Side.ENGINE)


def test_a_store_opened_before_a_fork_is_not_used_in_the_child(door):
    with opened(door.path) as store:
        store.put(KEYS, PAGES)
        pid = os.fork()
        if not pid:
            try:
                store.contains(KEYS)
            except RuntimeError as error:
                os._exit(0 if "fork" in str(error) else 1)
            os._exit(2)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        assert got(store) == [OK] * 4
