"""Which node an engine gets, and what it does without one it can use."""

from __future__ import annotations

import errno
import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
from cachekernels.region import Region

from cachesvc.client.base import Attachment, AttachRefused, AttachRequest, NodeAway
from cachesvc.client.inprocess import InProcessClient
from cachesvc.client.private import PrivateNode, PrivateNodeFailed
from cachesvc.clock import SystemClock
from cachesvc.node.node import Node
from cachesvc.outcomes import AttachResult
from engine_plugin.hicache import build as building
from engine_plugin.hicache import link
from engine_plugin.hicache.build import build_cache
from engine_plugin.hicache.config import AUTO, CacheConfig, CacheMode
from engine_plugin.hicache.controller import HybridCacheController
from engine_plugin.hicache.link import DaemonLink, LinkFailed, NodeLink, attach_if_useful, open_link
from engine_plugin.hicache.radix_cache import RadixCache
from engine_plugin.memory.pools import KVPool
from tests.helpers.caches import HANG_S
from tests.helpers.subjects import IDENTITY, NUM_PAGES, PAGE_SIZE, SHAPE

REQUEST = AttachRequest(IDENTITY, "engine", 4, IDENTITY.page_bytes())


def nobody() -> None:
    raise NodeAway("nobody is there")


@pytest.fixture
def away() -> Iterator[DaemonLink]:
    made = DaemonLink("unix:///nowhere.sock", nobody, "engine")
    yield made
    made.close()


def test_without_a_daemon_host_memory_is_the_engines_own(away: DaemonLink, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        attachment = away.attach(REQUEST)
    assert (attachment.region.num_frames, attachment.enabled, attachment.has_pages) == (4, True, False)
    assert attachment.namespace == IDENTITY.namespace()
    assert "no node at unix:///nowhere.sock (no node to be found: nobody is there)" in caplog.text
    assert not away.client.poll()


@pytest.mark.parametrize(
    "result", [AttachResult.REFUSED_DRAINING, AttachResult.REFUSED_CONNECTIONS, AttachResult.REFUSED_DESCRIPTORS]
)
def test_a_daemon_that_cannot_now_is_as_one_that_is_not_there(
    away: DaemonLink, result: AttachResult, monkeypatch: pytest.MonkeyPatch
) -> None:
    attach = away.client.attach

    def refuse(request: AttachRequest) -> Attachment:
        if request.offer is None:
            raise AttachRefused("not now", result)
        return attach(request)

    monkeypatch.setattr(away.client, "attach", refuse)
    assert isinstance(away.attach(REQUEST).region, Region)


def test_a_refusal_that_will_not_pass_is_told(away: DaemonLink, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(request: AttachRequest) -> Attachment:
        raise AttachRefused("frame_bytes: 1 here, 2 requested", AttachResult.REFUSED_GEOMETRY)

    monkeypatch.setattr(away.client, "attach", refuse)
    with pytest.raises(AttachRefused, match="frame_bytes"):
        away.attach(REQUEST)


def test_storage_flags_and_a_daemon_are_an_error_that_says_where_tiers_are_configured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(link, "dial_of", lambda address: nobody)
    config = CacheConfig(
        CacheMode.HIERARCHICAL, PAGE_SIZE, num_host_frames=4, storage_backend="file", node_address=AUTO
    )
    with pytest.raises(LinkFailed, match="has storage of its own, configured with it: leave 'file' out"):
        open_link(config)


def test_storage_that_cannot_be_opened_is_an_error_in_its_own_words(tmp_path: Path) -> None:
    config = CacheConfig(
        CacheMode.HIERARCHICAL,
        PAGE_SIZE,
        num_host_frames=4,
        storage_backend="file",
        storage_config={"pth": str(tmp_path)},
    )
    with pytest.raises(LinkFailed, match="did you mean 'path'"):
        open_link(config)


class RefusingLink(NodeLink):
    """A node that does not want this engine."""

    def __init__(self, result: AttachResult) -> None:
        self._result = result
        self.is_closed = False

    def attach(self, request: AttachRequest) -> Attachment:
        raise AttachRefused("protocol 1 here, 2 there", self._result)

    def close(self) -> None:
        self.is_closed = True

    def describe(self) -> list[str]:
        return []


def build(on: NodeLink) -> RadixCache:
    config = CacheConfig(CacheMode.HIERARCHICAL, PAGE_SIZE, num_host_frames=4)
    cache = build_cache(config, KVPool(SHAPE, NUM_PAGES, PAGE_SIZE), IDENTITY, SystemClock(), lambda _: on)
    assert isinstance(cache, RadixCache)
    return cache


def test_with_a_node_of_another_version_only_the_device_caches(caplog: pytest.LogCaptureFixture) -> None:
    refusing = RefusingLink(AttachResult.REFUSED_VERSION)
    with caplog.at_level(logging.WARNING):
        cache = build(refusing)
    assert not isinstance(cache, HybridCacheController)
    assert "only the device caches: protocol 1 here, 2 there" in caplog.text
    assert refusing.is_closed
    cache.shutdown(HANG_S)


def test_any_other_refusal_ends_the_start_and_leaves_nothing_open() -> None:
    refusing = RefusingLink(AttachResult.REFUSED_MEMORY)
    with pytest.raises(AttachRefused):
        build(refusing)
    assert refusing.is_closed


class AnsweringLink(NodeLink):
    """Answers with what it is given."""

    def __init__(self, answer: Attachment | Exception) -> None:
        self.answer = answer
        self.is_closed = False

    def attach(self, request: AttachRequest) -> Attachment:
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer

    def close(self) -> None:
        self.is_closed = True

    def describe(self) -> list[str]:
        return []


@pytest.mark.parametrize("what", ["RegionTransfer", "RadixTree", "HybridCacheController"])
def test_a_cache_that_cannot_be_built_leaves_no_session_open(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(building, what, fail)
    region = Region.create(4, IDENTITY.page_bytes(), reserve_bytes=0)
    answering = AnsweringLink(Attachment(1, region, bytes(32), enabled=True, warning=""))
    answering.client = InProcessClient(Node([], manual=True))
    with pytest.raises(RuntimeError, match="new thread"):
        build(answering)
    assert answering.is_closed


def test_a_private_node_ends_if_nobody_can_speak_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    node = PrivateNode([])

    def no_client(dial: object) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(PrivateNode, "started", lambda *_: node)
    monkeypatch.setattr(link, "ChannelClient", no_client)
    with pytest.raises(OSError, match="Too many open files"):
        open_link(CacheConfig(CacheMode.HIERARCHICAL, PAGE_SIZE, num_host_frames=4))
    with pytest.raises(PrivateNodeFailed, match="is going away"):
        node.dial()


def test_a_node_of_another_version_turns_the_cache_off(caplog: pytest.LogCaptureFixture) -> None:
    answering = AnsweringLink(AttachRefused("version 2 here, 1 there", AttachResult.REFUSED_VERSION))
    assert attach_if_useful(answering, REQUEST) is None
    assert answering.is_closed and "only the device caches: version 2 here" in caplog.text


def test_a_node_that_cannot_keep_the_pool_turns_the_cache_off(caplog: pytest.LogCaptureFixture) -> None:
    answering = AnsweringLink(Attachment(1, None, bytes(32), enabled=False, warning="pool x"))
    assert attach_if_useful(answering, REQUEST) is None
    assert answering.is_closed and "pool x" in caplog.text


def test_memory_that_is_not_there_is_an_error_at_the_start() -> None:
    answering = AnsweringLink(AttachRefused("need, have", AttachResult.REFUSED_MEMORY))
    with pytest.raises(AttachRefused, match="need, have"):
        attach_if_useful(answering, REQUEST)
    assert answering.is_closed
