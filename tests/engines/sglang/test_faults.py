"""What an engine sees when its node is not there, hangs, dies, comes back, or has pages that went bad: shorter hits,
never an error, never a wrong byte."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from itertools import count
from typing import Any

import numpy as np
import pytest
from cachekernels.region import Region

from tests.engines.sglang import media
from tests.engines.sglang.processes import Daemon
from tests.engines.sglang.rig import HANG_S, CacheRig, Model, Storage, kv_of

MODEL = Model()
TOKENS = list(range(1000, 1128))
OTHERS = list(range(5000, 5128))
QUICK = {"exists_timeout_ms": 2000, "get_timeout_ms": 4000, "put_timeout_ms": 3000}
"""For nodes that hang; long enough for one that is only slow."""
HEADER_BYTES = 4096
"""Of a page's file: its KV comes after that."""


def _storage(daemon: Daemon, **extra: object) -> Storage:
    return media.ours(daemon.address, **{**QUICK, **extra})


def _compute(rig: CacheRig, tokens: list[int]) -> None:
    rig.compute(tokens, kv_of(MODEL, tokens))


def _fetches(rig: CacheRig, tokens: list[int]) -> int:
    """Tokens that storage had, each of their bytes compared."""
    rig.forget()
    fetched = rig.fetch(tokens)
    assert rig.load(tokens) == fetched
    if fetched:
        assert np.array_equal(rig.on_device(tokens), kv_of(MODEL, tokens)[:fetched])
    rig.check()
    return fetched


def _until(is_so: Callable[[], bool], what: str) -> None:
    deadline_s = time.monotonic() + HANG_S
    while not is_so():
        assert time.monotonic() < deadline_s, f"{what}: not within {HANG_S:.0f} s"


def _works_again(rig: CacheRig) -> None:
    """Whatever broke is whole again: new prompts are stored and found."""
    starts = count(100_000, 1000)

    def is_stored() -> bool:
        first = next(starts)
        tokens = list(range(first, first + 64))
        rig.forget()
        _compute(rig, tokens)
        return _fetches(rig, tokens) == 64

    _until(is_stored, "a page stored and found")


@pytest.fixture
def files_daemon() -> Iterator[Daemon]:
    with Daemon(keeps_files=True) as daemon:
        yield daemon


def test_no_node_at_the_start() -> None:
    daemon = Daemon()
    with CacheRig(MODEL, _storage(daemon)) as rig:
        _compute(rig, TOKENS)
        assert _fetches(rig, TOKENS) == 0
        with daemon:
            _works_again(rig)


def test_a_node_that_is_killed_and_started_again(daemon: Daemon) -> None:
    with CacheRig(MODEL, _storage(daemon)) as rig:
        _compute(rig, TOKENS)
        assert _fetches(rig, TOKENS) == 128
        daemon.kill()
        assert _fetches(rig, TOKENS) == 0
        _compute(rig, OTHERS)
        daemon.start_again()
        assert _fetches(rig, TOKENS) == 0, "its memory went with it"
        _works_again(rig)


def test_a_tier_brings_pages_over_a_restart_of_the_node(files_daemon: Daemon) -> None:
    with CacheRig(MODEL, _storage(files_daemon)) as rig:
        _compute(rig, TOKENS)
        assert files_daemon.terminate() == 0
        files_daemon.start_again()
        _works_again(rig)
        assert _fetches(rig, TOKENS) == 128


@pytest.mark.timeout(100)
def test_a_node_that_hangs_costs_its_deadline_once_and_not_each_time(daemon: Daemon) -> None:
    """Thirty calls of five seconds each would be over this test's time."""
    with CacheRig(MODEL, _storage(daemon, exists_timeout_ms=5000)) as rig:
        _compute(rig, TOKENS)
        daemon.freeze()
        for _ in range(30):
            rig.forget()
            assert rig.fetch(TOKENS) == 0
        daemon.thaw()
        _works_again(rig)
        assert _fetches(rig, TOKENS) == 128, "it has kept what it had"


@pytest.mark.parametrize("moment", ["before the copy", "after the copy"])
def test_a_page_reused_while_its_put_hangs_is_never_stored_under_the_old_key(
    moment: str, daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    copied: list[int] = []
    write = Region.write

    def write_and_freeze(region: Region, *arguments: object, **more: object) -> object:
        if copied:
            return write(region, *arguments, **more)
        copied.append(1)
        if moment == "before the copy":
            daemon.freeze()
        result = write(region, *arguments, **more)
        daemon.freeze()
        return result

    monkeypatch.setattr(Region, "write", write_and_freeze)
    with CacheRig(MODEL, _storage(daemon), host_pages=64) as rig:
        _compute(rig, TOKENS)  # given up at its deadline
        assert copied
        slots = _host_slots(rig)
        rig.forget()
        _compute(rig, OTHERS)
        assert _host_slots(rig) & slots, "the same host pages hold something else now"
        daemon.thaw()
        for tokens in (TOKENS, OTHERS):
            _fetches(rig, tokens)  # compares what there is
        _works_again(rig)
    with CacheRig(MODEL, _storage(daemon)) as rig:
        for tokens in (TOKENS, OTHERS):
            _fetches(rig, tokens)


def test_a_get_that_hangs_writes_nothing_into_pages_that_others_have_by_then(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    with CacheRig(MODEL, _storage(daemon, get_timeout_ms=1500), host_pages=64) as rig:
        _compute(rig, TOKENS)
        rig.forget()
        backend = rig.controller.storage_backend
        get, asked = backend.batch_get_v1, []

        def freeze_and_get(hashes: list[str], slots: Any, more: Any = None) -> list[bool]:
            asked.append(set(slots.tolist()))
            daemon.freeze()
            return get(hashes, slots, more)

        monkeypatch.setattr(backend, "batch_get_v1", freeze_and_get)
        assert rig.fetch(TOKENS) == 0
        monkeypatch.undo()
        rig.cache.check_hicache_events()
        others = list(range(5000, 5000 + 62 * 16))  # nearly all of the host pool
        _compute(rig, others)
        assert _host_slots(rig) & asked[0], "the same host pages hold something else now"
        daemon.thaw()
        _works_again_beside(rig, others)
        rig.forget_device()
        assert rig.load(others) == len(others)
        assert np.array_equal(rig.on_device(others), kv_of(MODEL, others))


def _works_again_beside(rig: CacheRig, tokens: list[int]) -> None:
    """The node serves again, and what the engine has is left where it is."""
    backend, hashes = rig.controller.storage_backend, rig.page_hashes(TOKENS)
    _until(lambda: bool(backend.batch_exists(hashes) == 8), "pages found")
    assert rig.match(tokens).device_prefix_len == len(tokens)


@pytest.mark.parametrize("copy", ["read", "write"])
def test_a_node_that_is_killed_in_the_middle_of_a_copy(
    copy: str, daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    with CacheRig(MODEL, _storage(daemon)) as rig:
        _compute(rig, TOKENS)
        do_copy = getattr(Region, copy)

        def kill_and_copy(region: Region, *arguments: object, **more: object) -> object:
            daemon.kill()
            return do_copy(region, *arguments, **more)

        monkeypatch.setattr(Region, copy, kill_and_copy)
        if copy == "read":
            assert _fetches(rig, TOKENS) == 128, "the memory is the engine's as long as it is mapped"
        else:
            _compute(rig, OTHERS)
        monkeypatch.undo()
        assert daemon.process.poll() is not None
        assert _fetches(rig, TOKENS) == _fetches(rig, OTHERS) == 0
        daemon.start_again()
        _works_again(rig)


@pytest.fixture
def unharmed(shared_daemon: Daemon, request: pytest.FixtureRequest) -> Storage:
    """At a daemon that stays as it is, apart from other tests."""
    return media.ours(shared_daemon.address, model_revision=request.node.nodeid)


def test_a_clear_that_meets_a_put_leaves_nothing_of_it(unharmed: Storage, monkeypatch: pytest.MonkeyPatch) -> None:
    write = Region.write
    cleared: list[threading.Thread] = []
    with CacheRig(MODEL, unharmed) as rig:

        def write_and_be_cleared(region: Region, *arguments: object, **more: object) -> object:
            if not cleared:
                begun = threading.Event()
                cleared.append(threading.Thread(target=lambda: (begun.set(), rig.cache.clear_storage_backend())))
                cleared[0].start()
                assert begun.wait(HANG_S)
            return write(region, *arguments, **more)

        monkeypatch.setattr(Region, "write", write_and_be_cleared)
        _compute(rig, TOKENS)
        cleared[0].join(HANG_S)
        assert not cleared[0].is_alive()
        assert _fetches(rig, TOKENS) == 0, "it was on its way when all was to go"
        _compute(rig, OTHERS)
        assert _fetches(rig, OTHERS) == 128


def test_a_detach_in_the_middle_of_a_put_that_hangs(daemon: Daemon, monkeypatch: pytest.MonkeyPatch) -> None:
    storage = _storage(daemon, put_timeout_ms=1000)
    with CacheRig(MODEL, storage) as rig:
        put, is_putting = rig.controller.storage_backend.batch_set_v1, threading.Event()

        def freeze_and_put(*arguments: Any) -> list[bool]:
            daemon.freeze()
            is_putting.set()
            return put(*arguments)

        monkeypatch.setattr(rig.controller.storage_backend, "batch_set_v1", freeze_and_put)
        rig.begin_compute(TOKENS, kv_of(MODEL, TOKENS))
        rig.until(lambda: rig.cache.check_hicache_events() or is_putting.is_set(), "a put")
        assert rig.cache.detach_storage_backend()[0]
        assert not rig.cache.ongoing_backup
        daemon.thaw()
        assert rig.cache.attach_storage_backend(storage.backend, storage.extra_json(), "tests/model")[0]
        _works_again(rig)


PHASES = ["asked", "found", "copying", "copied"]


@pytest.mark.parametrize("phase", PHASES)
def test_a_request_that_is_aborted_at_any_moment_costs_nothing(
    phase: str, unharmed: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    with CacheRig(MODEL, unharmed) as rig:
        _compute(rig, TOKENS)
        rig.forget()
        room = rig.host.available_size()
        backend = rig.controller.storage_backend
        reached, goes_on = threading.Event(), threading.Event()

        def waiting(verb: Callable[..., Any], *, after: bool) -> Callable[..., Any]:
            def call(*arguments: Any) -> Any:
                answer = verb(*arguments) if after else None
                reached.set()
                assert goes_on.wait(HANG_S)
                return answer if after else verb(*arguments)

            return call

        verb = "batch_exists" if phase in ("asked", "found") else "batch_get_v1"
        monkeypatch.setattr(backend, verb, waiting(getattr(backend, verb), after=phase in ("found", "copied")))
        handle = rig.begin_fetch(TOKENS)
        rig.until(lambda: rig.cache.check_hicache_events() or reached.is_set(), phase)
        rig.cache.release_aborted_request(handle)
        goes_on.set()
        monkeypatch.undo()
        rig.until(lambda: rig.cache.check_hicache_events() or rig.host.available_size() == room, "all pages back")
        assert _fetches(rig, TOKENS) == 128


def test_calls_that_fail_and_are_late_by_chance_never_give_a_wrong_byte(
    unharmed: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SGLang's own fault injector around our storage."""
    monkeypatch.setenv("SGLANG_TEST_HICACHE_BACKEND_RANDOM_FAILURE", "0.3")
    prompts = [list(range(first, first + 128)) for first in range(10_000, 22_000, 1000)]
    with CacheRig(MODEL, unharmed) as rig:
        assert type(rig.controller.storage_backend).__name__ == "HiCacheStorageFailureInjector"
        for tokens in prompts:
            rig.forget()
            _compute(rig, tokens)
        found = [_fetches(rig, tokens) for tokens in prompts]
        assert 0 < sum(found) < 12 * 128


def _host_slots(rig: CacheRig) -> set[int]:
    return set(np.flatnonzero(rig.host.slot_used.numpy()).tolist())


@pytest.mark.parametrize("damage", ["a flipped bit", "cut short", "empty", "another page's bytes"])
def test_a_stored_page_that_went_bad_ends_the_prefix(damage: str, files_daemon: Daemon) -> None:
    daemon = files_daemon
    with CacheRig(MODEL, _storage(daemon)) as rig:
        _compute(rig, TOKENS)
        assert daemon.terminate() == 0
        _damage(daemon, damage)
        daemon.start_again()
        _works_again(rig)
        assert _fetches(rig, TOKENS) < 128
        rig.forget()
        _compute(rig, TOKENS)
        assert _fetches(rig, TOKENS) == 128, "computed and stored again"


def _damage(daemon: Daemon, damage: str) -> None:
    """One stored page of eight."""
    objects = sorted(daemon.pages.rglob("*.page"))
    assert len(objects) == 8, objects
    path = objects[0]
    content = bytearray(path.read_bytes())
    if damage == "a flipped bit":
        content[HEADER_BYTES + 100] ^= 4
    elif damage == "cut short":
        del content[-1]
    elif damage == "empty":
        content.clear()
    else:
        content[:] = objects[1].read_bytes()
    path.write_bytes(content)


def test_more_pages_than_the_node_has_memory_for() -> None:
    """The deepest and oldest leave; nothing fails, what is found is right."""
    with Daemon(managed="1 MiB") as daemon, CacheRig(MODEL, _storage(daemon, memory_gib=2**-10)) as rig:
        prompts = [list(range(first, first + 512)) for first in range(0, 40_000, 1000)]
        for tokens in prompts:
            rig.forget()
            _compute(rig, tokens)
        found = [_fetches(rig, tokens) for tokens in prompts]
        assert 0 < sum(found) < 40 * 512


def test_a_node_without_memory_to_lend_is_refused_with_what_it_has() -> None:
    with Daemon(managed=None) as daemon, pytest.raises(ValueError, match="managed"):
        CacheRig(MODEL, _storage(daemon))
