"""Store clients that are killed and stopped at random moments, on one small slab over a tier: no wrong byte, no frame
that is lost, no client that hangs."""

import random
import signal
import subprocess
import sys

from cachesvc.node.node import Node
from cachesvc.node.parts import NodeOptions
from cachesvc.node.tiers import Tier
from storage_backends.registry import open_backend
from tests.helpers.channels import RunningDoor
from tests.helpers.node_process import ROOT
from tests.helpers.store_player import MEMORY_BYTES
from tests.helpers.store_user import check_conserved

NUM_PLAYERS = 4
NUM_BLOWS = 9
CALLS_BETWEEN = 12


class Players:
    """Clients, some of which end early."""

    def __init__(self, path):
        self._path = path
        self._seed = 0
        self.running = [self._start() for _ in range(NUM_PLAYERS)]

    def _start(self):
        self._seed += 1
        command = [sys.executable, "-m", "tests.helpers.store_player", str(self._path), str(self._seed)]
        return subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def play(self, number, calls):
        """Returns when that player has made so many calls more."""
        said = self.running[number].stdout.read(calls)
        assert len(said) == calls, f"a player ended with status {self.running[number].wait()}"

    def kill(self, number):
        process = self.running[number]
        process.kill()
        process.communicate()
        self.running[number] = self._start()

    def stop_and_go_on(self, number, meanwhile):
        self.running[number].send_signal(signal.SIGSTOP)
        meanwhile()
        self.running[number].send_signal(signal.SIGCONT)

    def end(self):
        for process in self.running:
            process.communicate()
            assert process.returncode == 0


def test_clients_killed_and_stopped_at_random_moments(tmp_path):
    choose = random.Random(3)
    tier = Tier("file", open_backend("file", {"path": str(tmp_path / "pages"), "capacity_bytes": "4 MiB"}))
    with Node([tier], options=NodeOptions(managed_bytes=MEMORY_BYTES)) as node, RunningDoor(node) as door:
        players = Players(door.path)
        for _ in range(NUM_BLOWS):
            hit, other = choose.sample(range(NUM_PLAYERS), 2)
            players.play(hit, choose.randint(1, CALLS_BETWEEN))
            if choose.random() < 0.7:
                players.kill(hit)
            else:
                players.stop_and_go_on(hit, lambda other=other: players.play(other, CALLS_BETWEEN))
            node.tick()
        players.end()
        while node.managed.num_sessions():
            door.turn()
        node.tick()
        check_conserved(node)
        counts = node.managed.slabs()[0].counts()
        assert counts["quarantined"] == counts["writing"] == 0
        assert node.counters.worker_exceptions.value() == 0
        assert node.registry.snapshot()["cachesvc_channel_exceptions_total"] == 0
        assert node.registry.snapshot()["cachesvc_managed_conflicts_total"] == 0
