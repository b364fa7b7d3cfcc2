"""Storage comes and goes while the engine is warm: pages are named as if it had been there from the start."""

from __future__ import annotations

import numpy as np
import pytest

from tests.engines.sglang import media
from tests.engines.sglang.processes import Daemon
from tests.engines.sglang.rig import CacheRig, Model, Storage, kv_of

MODEL = Model()
BEGINNING = list(range(1000, 1064))
WHOLE = [*BEGINNING, *range(2000, 2064)]


def _attach(rig: CacheRig, storage: Storage) -> tuple[bool, str]:
    assert storage.backend is not None
    return rig.cache.attach_storage_backend(storage.backend, storage.extra_json(), "tests/model")


@pytest.mark.parametrize("core", ["rust", "python"])
@pytest.mark.parametrize("was_attached", [False, True])
def test_keys_of_a_warm_engine_equal_those_of_a_cold_one(was_attached: bool, core: str, storage: Storage) -> None:
    kv = kv_of(MODEL, WHOLE)
    with CacheRig(MODEL, storage if was_attached else Storage(), core=core) as warm:
        if was_attached:
            assert warm.cache.detach_storage_backend()[0]
        warm.compute(BEGINNING, kv)  # nobody stores it
        assert _attach(warm, storage)[0]
        warm.compute(WHOLE, kv)  # its second half is stored
    with CacheRig(MODEL, storage, core=core) as cold:
        assert cold.fetch(WHOLE) == 0, "a prefix has no hole"
        cold.compute(BEGINNING, kv)
        cold.forget()
        assert cold.fetch(WHOLE) == 128, "the second half hangs below keys that the cold engine computed"
        cold.load(WHOLE)
        assert np.array_equal(cold.on_device(WHOLE), kv)


def test_a_refused_attach_leaves_the_engine_as_it_was(storage: Storage) -> None:
    with CacheRig(MODEL, Storage()) as rig:
        wrong = Storage("dynamic", {**storage.extra, "adress": "auto"})
        is_attached, message = _attach(rig, wrong)
        assert not is_attached
        assert "adress" in message
        assert "address" in message
        rig.compute(BEGINNING, kv_of(MODEL, BEGINNING))
        assert _attach(rig, storage)[0]


def test_clear_takes_our_namespace_alone(storage: Storage, shared_daemon: Daemon) -> None:
    kv = kv_of(MODEL, WHOLE)
    neighbour = media.ours(shared_daemon.address, model_revision="test_clear's neighbour")
    with CacheRig(MODEL, neighbour) as rig:
        rig.compute(WHOLE, kv)
    with CacheRig(MODEL, storage) as rig:
        rig.compute(WHOLE, kv)
        rig.forget()
        assert rig.cache.clear_storage_backend()
        assert rig.fetch(WHOLE) == 0
        rig.compute(WHOLE, kv)
        rig.forget()
        assert rig.fetch(WHOLE) == 128, "it stores again"
    with CacheRig(MODEL, neighbour) as rig:
        assert rig.fetch(WHOLE) == 128


@pytest.mark.parametrize("fails", [False, True])
def test_page_hashes_are_built_while_only_the_attach_waits(
    fails: bool, storage: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SGLang would compile them in the thread that queries, for which a flush waits ten seconds and no longer."""
    asked = []

    def built(*arguments: object, **options: object) -> None:
        asked.append((arguments, options))
        if fails:
            raise RuntimeError("no compiler")

    monkeypatch.setattr("engine_plugin.sglang.storage.get_hash_str", built)
    with CacheRig(MODEL, Storage()) as rig:
        assert _attach(rig, storage)[0]
        assert len(asked) == 1
