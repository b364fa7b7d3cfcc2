"""Clients that disappear: what they read, what they may still write, and the proof of their death."""

import os
import subprocess
import sys

from tests.helpers.store_user import (
    StoreUser,
    check_conserved,
    positions,
)
from tests.oracles.pages import run_all
from tests.unit.managed.pages import KEYS, MISS, OK


def test_a_lost_client_releases_what_it_read(bare):
    user, other = StoreUser(bare), StoreUser(bare)
    user.put(KEYS[:4])
    user.find(KEYS[:4])
    bare.managed.lost(user.session)
    assert bare.managed.slabs()[0].counts()["held"] == 0
    other.put(KEYS[4:8])
    assert other.put(KEYS[8:12]) == [OK] * 4


def test_frames_that_a_lost_client_may_still_write_are_not_used_before_it_is_dead(bare):
    user, other = StoreUser(bare), StoreUser(bare)
    other.region.close()  # the lock is the user's alone
    reserved = user.reserve(KEYS[:4])
    bare.managed.lost(user.session)
    assert other.answer(other.ask("reserve", KEYS[4:8], positions(4))).outcomes.tolist() == [OK] * 4
    user.write(KEYS[:4], reserved.frames)  # it was not dead
    bare.tick()
    assert other.session.slab.counts()["quarantined"] == 4
    assert other.contains(KEYS[:4]) == [MISS] * 4
    user.region.close()
    bare.tick()
    assert other.session.slab.counts()["quarantined"] == 0
    assert StoreUser(bare).put(KEYS[:4]) == [OK] * 4


def test_a_client_whose_process_is_seen_is_dead_when_that_has_ended(bare):
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    peer = os.pidfd_open(child.pid)
    user = StoreUser(bare, peer=peer)
    os.close(peer)
    user.reserve(KEYS[:4])
    user.region.close()  # says nothing about a client that can be seen
    bare.managed.lost(user.session)
    bare.tick()
    assert user.session.slab.counts()["quarantined"] == 4
    child.communicate(b"\n")
    bare.tick()
    assert user.session.slab.counts()["quarantined"] == 0


def test_a_client_that_died_before_its_connection_is_not_waited_for(bare):
    user = StoreUser(bare)
    user.reserve(KEYS[:4])
    user.region.close()
    bare.managed.lost(user.session)
    assert user.session.slab.counts()["free"] == 8


def test_a_client_that_comes_back_says_that_it_writes_no_more(bare):
    user = StoreUser(bare)
    user.reserve(KEYS[:4])
    bare.managed.lost(user.session)
    StoreUser(bare, tenant="team-b", previous=user.session.session_id)
    assert user.session.slab.counts()["quarantined"] == 4, "another tenant's word was taken"
    StoreUser(bare, previous=user.session.session_id + 77)
    assert user.session.slab.counts()["quarantined"] == 4, "another session's word was taken"
    again = StoreUser(bare, previous=user.session.session_id)
    assert user.session.slab.counts()["quarantined"] == 0
    assert again.put(KEYS[:4]) == [OK] * 4


def test_leaving_gives_back_what_was_granted(bare):
    user = StoreUser(bare)
    user.reserve(KEYS[:4])
    bare.managed.leave(user.session)
    bare.managed.leave(user.session)
    assert bare.managed.slabs()[0].counts()["free"] == 8


def test_a_read_that_its_client_gave_up_ends_and_keeps_what_arrived(node):
    user = StoreUser(node)
    for first in range(0, 16, 4):
        user.put(KEYS[first : first + 4])
        run_all(node)
    call = user.ask("get", KEYS[:4], positions(4))
    user.session.release(call)
    run_all(node)
    assert user.answer(call) is None
    assert user.session.slab.counts()["held"] == 0
    check_conserved(node)


def test_a_client_lost_while_its_pages_are_read_leaves_them(node, backend):
    user, other = StoreUser(node), StoreUser(node)
    for first in range(0, 16, 4):
        user.put(KEYS[first : first + 4])
        run_all(node)

    def meanwhile(ids):
        backend.before.clear()
        node.managed.lost(user.session)

    backend.before["get"] = meanwhile
    user.ask("get", KEYS[:4], positions(4))
    run_all(node)
    assert other.session.slab.counts()["held"] == 0
    assert other.get(KEYS[:4]) == [OK] * 4
    assert sum(backend.reads.values()) == 4
