"""From vLLM's configuration to the scheduler's half: what is refused, what turns the cache off, who shares pages."""

from __future__ import annotations

import errno
import threading
from types import SimpleNamespace

import pytest

from cachesvc.client.base import Attachment, AttachRequest
from cachesvc.client.inprocess import InProcessClient
from cachesvc.config.model import ConfigError
from cachesvc.node.node import Node
from cachesvc.outcomes import Bypass
from engine_plugin.hicache.link import NodeLink
from engine_plugin.vllm import compatibility
from engine_plugin.vllm import setup as setting_up
from engine_plugin.vllm.compatibility import Fields, Function, Incompatible, Method
from engine_plugin.vllm.metadata import WorkerShape
from engine_plugin.vllm.scheduler_half import SchedulerHalf
from engine_plugin.vllm.setup import EngineSetup, Scopes, scheduler_half
from tests.helpers.vllm_engine import IDENTITY, PAGE

HERE = "tests.unit.test_vllm_setup"


def setup(*, role="kv_both", algo="sha256", policy="recompute", extra=None, events=None) -> EngineSetup:
    config = SimpleNamespace(
        kv_transfer_config=SimpleNamespace(
            kv_role=role, kv_load_failure_policy=policy, kv_connector_extra_config=extra or {}
        ),
        cache_config=SimpleNamespace(prefix_caching_hash_algo=algo),
        kv_events_config=events,
    )
    return EngineSetup(config, SimpleNamespace(), PAGE)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"role": "kv_consumer"}, "kv_role=kv_consumer: .* set kv_both"),
        ({"algo": "xxhash"}, "xxhash"),
        ({"extra": {"write_policy": "write_back"}}, "write_back"),
        ({"extra": {"adress": "auto"}}, "unknown key 'adress'"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_is_started(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        scheduler_half(setup(**changes))


def test_a_policy_that_fails_requests_is_warned_about(caplog: pytest.LogCaptureFixture) -> None:
    setup().connector_config()
    assert not caplog.text
    setup(policy="fail").connector_config()
    assert "set 'recompute'" in caplog.text


def test_events_are_kept_for_those_who_follow_them() -> None:
    assert not setup().wants_events
    assert setup(events=SimpleNamespace(enable_kv_cache_events=True)).wants_events


# ---------------------------------------------------------------- a start that fails half-way
class OpenLink(NodeLink):
    """A node in this process."""

    def __init__(self) -> None:
        self._node = Node([], manual=True)
        self.client = InProcessClient(self._node)
        self.num_closed = 0

    def attach(self, request: AttachRequest) -> Attachment:
        return self.client.attach(request)

    def close(self) -> None:
        self.num_closed += 1
        self.client.detach()
        self._node.close()

    def describe(self) -> list[str]:
        return []


@pytest.fixture
def link(monkeypatch: pytest.MonkeyPatch) -> OpenLink:
    """What the half finds, for an engine of which nothing is asked."""
    made = OpenLink()
    monkeypatch.setattr(setting_up, "why_unsupported", lambda *_: "")
    monkeypatch.setattr(setting_up, "engine_identity", lambda *_: IDENTITY)
    monkeypatch.setattr(setting_up, "open_link", lambda _: made)
    return made


def start(half: SchedulerHalf) -> None:
    half.start({(0, 0): WorkerShape(0, 0, IDENTITY.num_layers, IDENTITY.page_bytes() // IDENTITY.num_layers, "layout")})


def half_of(num_blocks: int = 8) -> SchedulerHalf:
    return scheduler_half(EngineSetup(setup().vllm_config, SimpleNamespace(num_blocks=num_blocks), PAGE))


def region_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name in ("cachesvc-region", "cachesvc-idle")]


@pytest.mark.parametrize("what", ["SchedulerCore", "RegionServer", "frame_offsets", "size"])
def test_a_set_up_that_fails_half_way_leaves_nothing_open(
    link: OpenLink, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(setting_up, what, fail)
    half = half_of()
    with pytest.raises(OSError, match="Too many open files"):
        start(half)
    assert link.num_closed == 1 and not region_threads()
    half.shutdown()
    assert link.num_closed == 1


def test_so_does_a_half_that_cannot_watch_its_node(link: OpenLink, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("can't start new thread")

    half = half_of()
    half._watch_idle = fail
    with pytest.raises(RuntimeError, match="new thread"):
        start(half)
    assert link.num_closed == 1 and not region_threads()
    half.shutdown()
    assert link.num_closed == 1


def test_what_a_start_has_opened_ends_with_the_half(link: OpenLink) -> None:
    half = half_of()
    start(half)
    assert link.num_closed == 0 and len(region_threads()) == 2
    half.shutdown()
    half.shutdown()
    assert link.num_closed == 1 and not region_threads()


# ---------------------------------------------------------------- scopes
def request(**changes: object) -> SimpleNamespace:
    return SimpleNamespace(**{"lora_request": None, "mm_features": [], "resumable": False, **changes})


def test_adapters_share_by_content_and_not_by_name(tmp_path) -> None:
    scopes = Scopes()
    adapters = []
    for number, (name, content) in enumerate([("a", b"one"), ("b", b"two"), ("c", b"one")]):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "adapter_config.json").write_text("{}")
        (folder / "adapter_model.bin").write_bytes(content)
        adapters.append(SimpleNamespace(lora_path=str(folder), lora_int_id=number))
    first, second, third = (scopes.scope_of(request(lora_request=adapter), "") for adapter in adapters)
    assert first == third != second
    assert first != scopes.scope_of(request(), "")
    assert first != scopes.scope_of(request(lora_request=adapters[0]), "salt")
    gone = SimpleNamespace(lora_path=str(tmp_path / "none"), lora_int_id=9)
    assert scopes.scope_of(request(lora_request=gone), "") is Bypass.ADAPTER


def test_a_request_with_nothing_safe_to_share_in_says_why() -> None:
    scopes = Scopes()
    assert scopes.scope_of(request(resumable=True), "") is Bypass.STREAMING
    named = SimpleNamespace(identifier="my-picture")
    hashed = SimpleNamespace(identifier="ab" * 32)
    assert scopes.scope_of(request(mm_features=[named]), "") is Bypass.INPUT
    assert scopes.scope_of(request(mm_features=[hashed]), "") == scopes.scope_of(request(), "")


# ---------------------------------------------------------------- hooks
class Hooked:
    """Stands for a class of vLLM."""

    def called(self, request, blocks=None):
        """Nothing."""

    @property
    def number(self) -> int:
        return 1


def function(first, second):
    """Nothing."""


def test_a_hook_that_is_there_is_no_problem() -> None:
    good = [
        Method(f"{HERE}:Hooked", "called", ("request",)),
        Method(f"{HERE}:Hooked", "called", ("request", "blocks")),
        Method(f"{HERE}:Hooked", "number"),
        Fields("engine_plugin.vllm.metadata:StoreOp", ("op", "blocks")),
        Fields("cachesvc.outcomes:Bypass", ("ADAPTER",)),
        Function(f"{HERE}:function", ("first",)),
    ]
    assert [hook.problem() for hook in good] == [None] * len(good)


@pytest.mark.parametrize(
    ("hook", "problem"),
    [
        (Method(f"{HERE}:Hooked", "gone", ()), "Hooked.gone is missing"),
        (Method(f"{HERE}:Hooked", "called", ("blocks",)), "takes \\(request, blocks\\), expected \\(blocks\\)"),
        (Method(f"{HERE}:Nobody", "called", ()), "Nobody cannot be found"),
        (Fields("engine_plugin.vllm.metadata:StoreOp", ("op", "pages")), "has no pages"),
        (Function(f"{HERE}:function", ("second",)), "takes \\(first, second\\)"),
        (Function("no.such.module:function", ()), "cannot be found"),
    ],
)
def test_a_hook_that_changed_is_named(hook: compatibility.Hook, problem: str) -> None:
    with pytest.raises(AssertionError, match=problem):
        assert hook.problem() is None, hook.problem()


def test_an_incompatible_vllm_is_an_error_and_an_unknown_one_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(Incompatible, match=r"vLLM 0\.99 does not fit .*KVConnectorBase_V1 cannot be found"):
        compatibility.check("0.99")
    monkeypatch.setattr(compatibility, "problems", list)
    compatibility.check("0.32.0")
    assert not caplog.text
    compatibility.check("0.33.1")
    assert "not with 0.33.1" in caplog.text
