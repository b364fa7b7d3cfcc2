"""The admin door's routes, without a socket: health from progress, metrics, JSON, and who may ask."""

import json
import threading

import numpy as np
import pytest
from starlette.testclient import TestClient

from cachesvc.client.base import AttachRequest
from cachesvc.client.inprocess import InProcessClient
from cachesvc.daemon.admin import build_app
from cachesvc.daemon.health import LATE_S, Health, Heartbeat
from cachesvc.identity import Identity
from cachesvc.node.node import Node
from cachesvc.node.parts import NodeOptions
from cachesvc.node.tiers import Tier
from storage_backends.base import Outcome, outcomes
from storage_backends.errors import StorageUnavailable
from storage_backends.layers.fault import Answer, FaultLayer, Raise, Script
from storage_backends.layers.passing import PassingLayer
from storage_backends.registry import open_backend

IDENTITY = Identity(
    model_id="m",
    weights_digest="",
    config_digest="",
    dtype="bfloat16",
    page_size=16,
    num_layers=1,
    num_kv_heads=1,
    head_dim=8,
)


class HandClock:
    def __init__(self):
        self.seconds = 0.0

    def now(self):
        return self.seconds

    def wait_until(self, condition, deadline_s):
        condition.wait()


@pytest.fixture
def clock():
    return HandClock()


@pytest.fixture
def script():
    return Script()


@pytest.fixture
def node(clock, script):
    tiers = [
        Tier("good", open_backend("memory", {})),
        Tier("bad", FaultLayer(open_backend("memory", {}), script, lambda _: None)),
    ]
    with Node(tiers, clock=clock, manual=True) as node:
        yield node


@pytest.fixture
def heartbeat(clock):
    return Heartbeat(clock)


@pytest.fixture
def client(node, heartbeat):
    app = build_app(node, Health(node, heartbeat), "127.0.0.1", {"version": lambda: {"version": "1"}})
    return TestClient(app, base_url="http://127.0.0.1:1")


def attach(node):
    client = InProcessClient(node)
    client.attach(AttachRequest(IDENTITY, "engine-1", 4, IDENTITY.page_bytes()))
    return client


def test_health_follows_the_loops_beat(client, heartbeat, clock):
    assert client.get("/healthz").status_code == 200
    clock.seconds = LATE_S
    answer = client.get("/healthz")
    assert answer.status_code == 503
    assert "event loop" in answer.text
    assert client.get("/readyz").status_code == 503
    heartbeat.beat()
    assert client.get("/healthz").status_code == 200
    assert client.get("/readyz").status_code == 200


def test_a_node_that_closes_is_not_ready(client, node):
    node.close()
    answer = client.get("/readyz")
    assert answer.status_code == 503
    assert answer.json()["reasons"] == ["the node is closing"]
    assert client.get("/healthz").status_code == 200
    assert client.get("/metrics").status_code == 200


def test_a_tier_in_trouble_is_not_ready_and_the_node_is(client, node, script):
    assert client.get("/readyz/bad").status_code == 200
    script.add("get", Raise(StorageUnavailable("down")))
    attach(node).prefetch(np.zeros((1, 32), np.uint8), np.zeros(1, np.int32), np.zeros(1, np.uint32))
    while node.run_one():
        pass
    answer = client.get("/readyz/bad")
    assert (answer.status_code, answer.json()["reasons"]) == (503, ["read fails: unavailable"])
    assert client.get("/readyz/good").status_code == 200
    ready = client.get("/readyz")
    assert ready.status_code == 200
    assert {tier["name"]: tier["troubles"] for tier in ready.json()["tiers"]} == {
        "good": [],
        "bad": ["read fails: unavailable"],
    }
    assert [tier["is_ready"] for tier in client.get("/api/tiers").json()] == [True, False]


def test_a_full_disk_is_trouble_until_a_page_is_stored_again(client, node, script, clock):
    """A backend answers page by page that nothing could be stored; it raises nothing."""
    engine = attach(node)
    region = engine._session.region
    frames, keys, depths = np.zeros(1, np.int32), np.ones((1, 32), np.uint8), np.zeros(1, np.uint32)
    region.begin_write(frames)
    region.write_records(frames, keys, depths)
    region.commit(frames)

    def store():
        engine.backup(keys, frames, depths)
        while node.run_one():
            pass

    script.add("put", Answer(Outcome.NO_SPACE))
    store()
    answer = client.get("/readyz/bad")
    assert (answer.status_code, answer.json()["reasons"]) == (503, ["write fails: no_space"])
    clock.seconds = 3600.0
    assert client.get("/readyz").json()["tiers"][1]["troubles"] == ["write fails: no_space"]
    store()
    assert client.get("/readyz/bad").status_code == 200


def test_a_tier_that_was_down_at_the_start_is_asked_until_it_answers(clock):
    class Away(PassingLayer):
        is_away = True

        def contains(self, ids):
            asked.set()
            return outcomes(len(ids), Outcome.UNAVAILABLE if self.is_away else Outcome.MISS)

    asked, backend = threading.Event(), Away(open_backend("memory", {}))
    tier = Tier("far", backend, trouble="does not answer: refused")
    with Node([tier], clock=clock, manual=True) as node:
        app = build_app(node, Health(node, Heartbeat(clock)), "127.0.0.1", {})
        client = TestClient(app, base_url="http://127.0.0.1")
        assert client.get("/readyz/far").json()["reasons"] == ["probe fails: does not answer: refused"]
        node.holds(np.zeros((1, 32), np.uint8))  # memory knows nothing of the medium's health
        clock.seconds = 5.0
        node.tick()
        assert asked.wait(60)
        while client.get("/readyz/far").json()["reasons"] != ["probe fails: unavailable"]:
            pass
        backend.is_away = False
        clock.seconds = 200.0
        assert client.get("/readyz/far").status_code == 503
        node.tick()
        while client.get("/readyz/far").status_code != 200:
            pass


def test_all_workers_stuck_is_not_ready_and_metrics_answer(clock):
    """A medium that hangs for good; what needs no worker goes on."""
    entered, release = threading.Event(), threading.Event()

    class Hanging(PassingLayer):
        def get_into(self, ids, segments):
            entered.set()
            release.wait()
            return super().get_into(ids, segments)

    options = NodeOptions(num_workers=1, stuck_after_s=10.0)
    with Node([Tier("far", Hanging(open_backend("memory", {})))], clock=clock, options=options) as node:
        app = build_app(node, Health(node, Heartbeat(clock)), "127.0.0.1", {})
        client = TestClient(app, base_url="http://127.0.0.1")
        engine = attach(node)
        engine.prefetch(np.zeros((1, 32), np.uint8), np.zeros(1, np.int32), np.zeros(1, np.uint32))
        assert entered.wait(60)
        assert client.get("/readyz/far").status_code == 200
        clock.seconds = 10.0
        assert client.get("/readyz").status_code == 503
        assert client.get("/readyz/far").json()["reasons"] == ["a read has been running for 10 s"]
        assert "cachesvc_ready 0.0" in client.get("/metrics").text.splitlines()
        release.set()
        while "cachesvc_ready 1.0" not in client.get("/metrics").text.splitlines():
            pass


def test_a_tier_nobody_has_names_those_there_are(client):
    answer = client.get("/readyz/redis")
    assert answer.status_code == 404
    assert "good, bad" in answer.json()["error"]


def test_sessions_and_regions(client, node):
    engine = attach(node)
    (session,) = client.get("/api/sessions").json()
    assert (session["group"], session["model_id"], session["num_ops"]) == ("engine-1", "m", 0)
    (region,) = client.get("/api/regions").json()
    assert region["manager"] == f"session {session['session_id']}"
    assert (region["num_frames"], region["frame_bytes"]) == (4, IDENTITY.page_bytes())
    assert (region["total_bytes"], region["num_clients"]) == (4 * 4096, 1)
    engine.detach()
    assert client.get("/api/sessions").json() == client.get("/api/regions").json() == []


def test_metrics_are_the_nodes_numbers(client, node):
    attach(node)
    lines = client.get("/metrics").text.splitlines()
    assert "cachesvc_sessions 1.0" in lines
    assert 'cachesvc_attaches_total{result="attached"} 1.0' in lines
    assert any(line.startswith("process_resident_memory_bytes ") for line in lines)


def test_another_name_for_this_machine_is_refused(client):
    for host in ("evil.example", "evil.example:9741"):
        assert client.get("/api/version", headers={"host": host}).status_code == 400
    for host in ("localhost", "localhost:9741", "[::1]:9741", "127.0.0.1:9741"):
        assert client.get("/api/version", headers={"host": host}).status_code == 200


def test_nothing_can_be_changed_and_nothing_else_is_there(client):
    for path in ("/metrics", "/api/node", "/healthz"):
        assert client.post(path).status_code in (404, 405)
    assert client.get("/api/nothing").status_code == 404
    assert client.get("/" + "x" * 10_000).status_code == 404


def test_health_answers_while_an_answer_hangs(node, heartbeat):
    """JSON and metrics run in threads; health does not wait for them."""
    asked, release = threading.Event(), threading.Event()

    def hang():
        asked.set()
        release.wait()
        return {}

    app = build_app(node, Health(node, heartbeat), "127.0.0.1", {"hanging": hang})
    with TestClient(app, base_url="http://127.0.0.1") as client:
        answers = []
        thread = threading.Thread(target=lambda: answers.append(client.get("/api/hanging")))
        thread.start()
        asked.wait()
        assert client.get("/healthz").status_code == 200
        release.set()
        thread.join()
    assert json.loads(answers[0].text) == {}
