"""How a rank gets the region's memory."""

from __future__ import annotations

import errno
import os
import socket
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from cachekernels.region import Region, Side

from engine_plugin.vllm import region_sharing
from engine_plugin.vllm.metadata import RegionAddress
from engine_plugin.vllm.region_sharing import RETRY_S, RegionServer, RegionUnavailable, SharedRegion, fetch_region
from tests.helpers.caches import HANG_S

FRAMES = np.array([2], np.int32)
KEY = np.full((1, 32), 7, np.uint8)


@pytest.fixture
def region() -> Region:
    return Region.create(4, 8192, reserve_bytes=0)


@pytest.fixture
def server(region: Region) -> Iterator[RegionServer]:
    made = RegionServer(region)
    yield made
    made.close()


def address_of(server: RegionServer, region: Region) -> RegionAddress:
    return RegionAddress(server.socket_path, region.region_id, {(0, 0): 0})


def test_both_halves_in_one_process_see_the_same_bytes(region: Region, server: RegionServer) -> None:
    mine = fetch_region(address_of(server, region))
    assert (mine.region_id, mine.num_frames, mine.frame_bytes) == (region.region_id, 4, 8192)
    region.begin_write(FRAMES)
    mine.data()[2, :8192] = 5
    region.write_records(FRAMES, KEY, np.zeros(1, np.uint32))
    region.commit(FRAMES)
    assert (region.data()[2, :8192] == 5).all()
    assert mine.snapshot(FRAMES, KEY).all()


def test_a_rank_in_another_process_writes_what_the_scheduler_half_reads_and_holds_the_region(
    region: Region, server: RegionServer
) -> None:
    """It holds it until it ends: a node must not take back frames that a rank may still write."""
    code = """
        import sys
        from engine_plugin.vllm.metadata import RegionAddress
        from engine_plugin.vllm.region_sharing import fetch_region
        region = fetch_region(RegionAddress(sys.argv[1].replace("@", chr(0)), bytes.fromhex(sys.argv[2]), {}))
        region.data()[1, :4] = 9
        print("mapped", flush=True)
        sys.stdin.readline()
    """
    arguments = [server.socket_path.replace("\0", "@"), region.region_id.hex()]
    rank = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code), *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )
    assert rank.stdin and rank.stdout
    assert rank.stdout.readline() == "mapped\n"
    assert (region.data()[1, :4] == 9).all()
    assert region.is_held(Side.ENGINE)
    rank.kill()  # dies without a word
    rank.communicate(timeout=HANG_S)
    assert not region.is_held(Side.ENGINE)


def test_the_memory_is_not_given_to_one_who_does_not_know_its_id(
    region: Region, server: RegionServer, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(RegionUnavailable, match="refused"):
        fetch_region(RegionAddress(server.socket_path, bytes(16), {}))
    assert fetch_region(address_of(server, region)).num_frames == 4  # the next one is served
    assert "asked for another one" in caplog.text


def test_nor_to_another_user(region: Region, server: RegionServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(region_sharing, "_uid_of_peer", lambda connection: 12345)
    with pytest.raises(RegionUnavailable, match="the peer is user 12345"):
        fetch_region(address_of(server, region))


def test_a_rank_that_says_nothing_holds_up_no_other_for_long(
    region: Region, server: RegionServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(region_sharing, "HEAR_S", 0.01)
    silent = socket.socket(socket.AF_UNIX)
    silent.connect(server.socket_path)
    assert fetch_region(address_of(server, region), HANG_S).num_frames == 4
    silent.close()


def test_a_shortage_of_descriptors_passes(
    region: Region, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(region_sharing, "HEAR_S", 0.01)
    real, tries = socket.socket.accept, []

    def accept(self: socket.socket) -> object:
        tries.append(1)
        if len(tries) == 1:
            raise OSError(errno.EMFILE, "Too many open files")
        return real(self)

    monkeypatch.setattr(socket.socket, "accept", accept)
    server = RegionServer(region)
    assert fetch_region(address_of(server, region), HANG_S).num_frames == 4
    server.close()
    assert "Too many open files" in caplog.text


def test_a_server_that_says_nothing_is_waited_for_no_longer_than_allowed() -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind("\0cachesvc-test-silent")
        listener.listen()
        with pytest.raises(RegionUnavailable, match="timed out"):
            fetch_region(RegionAddress("\0cachesvc-test-silent", bytes(16), {}), 0.01)


@pytest.mark.parametrize("what", ["one fd", "no region", "another region"])
def test_whatever_else_comes_is_refused_and_no_descriptor_stays_open(what: str, region: Region) -> None:
    other = Region.create(1, 4096, reserve_bytes=0)
    fds = {
        "one fd": [region.data_fd],
        "no region": [region.data_fd, region.data_fd],
        "another region": [other.data_fd, other.directory_fd],
    }[what]
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind("\0cachesvc-test-odd")
        listener.listen()

        def answer() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(16)
                socket.send_fds(connection, [b"+"], fds)

        thread = threading.Thread(target=answer)
        thread.start()
        before = len(list(Path("/proc/self/fd").iterdir()))
        with pytest.raises(RegionUnavailable):
            fetch_region(RegionAddress("\0cachesvc-test-odd", region.region_id, {}))
        thread.join(HANG_S)
        assert len(list(Path("/proc/self/fd").iterdir())) <= before


def test_a_rank_does_not_use_memory_whose_manager_died_before_the_rank_held_it(region: Region) -> None:
    """Somebody else may manage it by then."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind("\0cachesvc-test-dies")
        listener.listen()

        def give_and_die() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(16)
                socket.send_fds(connection, [b"+"], [region.data_fd, region.directory_fd])

        thread = threading.Thread(target=give_and_die)
        thread.start()
        with pytest.raises(RegionUnavailable, match=r"closed the connection|Broken pipe|reset by peer"):
            fetch_region(RegionAddress("\0cachesvc-test-dies", region.region_id, {}))
        thread.join(HANG_S)
    assert not region.is_held(Side.ENGINE)


@pytest.mark.parametrize("what", ["listen", "start"])
def test_a_server_that_cannot_start_leaves_no_descriptor_open(
    region: Region, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(socket.socket if what == "listen" else threading.Thread, what, fail)
    before = len(list(Path("/proc/self/fd").iterdir()))
    with pytest.raises(RuntimeError) as raised:
        RegionServer(region)
    assert len(list(Path("/proc/self/fd").iterdir())) == before, raised  # whose trace keeps the server


def test_after_the_end_nobody_answers_and_a_closed_region_is_not_given(region: Region) -> None:
    server = RegionServer(region)
    region.close()
    with pytest.raises(RegionUnavailable, match="refused"):
        fetch_region(RegionAddress(server.socket_path, region.region_id, {}))
    server.close()
    server.close()
    with pytest.raises(RegionUnavailable, match="refused"):
        fetch_region(RegionAddress(server.socket_path, region.region_id, {}))


class TestSharedRegion:
    """What a rank keeps of it."""

    def setup_method(self) -> None:
        self.now_s = 0.0
        self.fetched: list[bytes] = []
        self.is_away = False
        self.shared = SharedRegion(lambda region, address: region, lambda: self.now_s, self.fetch)

    def fetch(self, address: RegionAddress) -> Region:
        self.fetched.append(address.region_id)
        if self.is_away:
            raise RegionUnavailable("told to fail")
        return Region.create(1, 4096, reserve_bytes=0)

    def address(self, name: bytes) -> RegionAddress:
        return RegionAddress("\0x", name, {})

    def test_it_is_fetched_once(self) -> None:
        first = self.shared.get(self.address(b"a"))
        assert first is not None
        assert self.shared.get(self.address(b"a")) is first
        assert self.fetched == [b"a"]

    def test_one_that_takes_its_place_is_fetched_and_what_is_in_use_stays(self) -> None:
        first = self.shared.get(self.address(b"a"))
        second = self.shared.get(self.address(b"b"))
        assert first is not None and second is not None and second is not first
        assert first.data().shape == (1, 4096)  # not closed under whoever copies

    def test_one_that_cannot_be_had_is_asked_for_again_after_a_while_and_said_once(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        self.is_away = True
        assert self.shared.get(self.address(b"a")) is None
        assert self.shared.get(self.address(b"a")) is None
        assert self.fetched == [b"a"]
        self.now_s = RETRY_S
        assert self.shared.get(self.address(b"a")) is None
        self.is_away, self.now_s = False, 2 * RETRY_S
        assert self.shared.get(self.address(b"a")) is not None
        assert self.fetched == [b"a"] * 3
        assert caplog.text.count("told to fail") == 1

    def test_a_failure_takes_nothing_from_the_one_that_works(self) -> None:
        first = self.shared.get(self.address(b"a"))
        self.is_away = True
        assert self.shared.get(self.address(b"b")) is None
        assert self.shared.get(self.address(b"a")) is first

    def test_a_region_without_a_place_for_this_rank_is_none(self) -> None:
        shared = SharedRegion(lambda region, address: address.offsets[1, 1], lambda: 0.0, self.fetch)
        assert shared.get(self.address(b"a")) is None
