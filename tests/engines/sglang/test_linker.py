"""The experimental linker on SGLang's own tree: L1 to the node's memory and back, without host memory between."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from prometheus_client import REGISTRY
from sglang.srt.mem_cache.base_prefix_cache import InitLoadBackParams, MatchPrefixParams
from sglang.srt.mem_cache.unified_cache.linker_factory import create_unified_cache_linker

from engine_plugin.sglang.metrics import NAME
from tests.engines.sglang import media
from tests.engines.sglang.processes import Daemon
from tests.engines.sglang.rig import CacheRig, Model, Storage, kv_of

TOKENS = list(range(1000, 1000 + 6 * 16 + 5))
OTHERS = list(range(5000, 5000 + 4 * 16))


class LinkerRig(CacheRig):
    """A cache whose pages go from the device to the node, as SGLang's registry builds it. Requests are named."""

    def __init__(self, model: Model, address: str, revision: str, *, core: str = "rust", ranks: int = 1) -> None:
        options = {"address": address, "model_revision": revision, "memory_gib": media.MEMORY_GIB}
        self._options = {**options, **media.PATIENCE}
        super().__init__(model, Storage(), core=core, ranks=ranks)

    def _attach(self) -> None:
        config = {
            "linker": "CachesvcLinker",
            "linker_module_path": "engine_plugin.sglang.linker",
            "linker_extra_config": self._options,
        }
        linker = create_unified_cache_linker(
            self.server_args,
            replace(self.cache_params, enable_metrics=True),
            backend="dynamic",
            config=config,
            components=set(self.cache.components),
        )
        self.cache.init_cache_linker(linker)
        self.device.register_layer_transfer_counter(self.cache.linker.layer_done_counter)

    def settle(self) -> None:
        def is_over() -> bool:
            self.cache.check_hicache_events()
            return not self.cache.linker.pending_offloads

        self.until(is_over, "offloads")

    def look(self, rid: str, tokens: Sequence[int]) -> Any:
        """A request in the scheduler's queue, matched."""
        request = SimpleNamespace(rid=rid, session=None, swa_branching_seqlen=None, kv=None)
        request.found = self.cache.match_prefix(MatchPrefixParams(key=self._key(tokens, {}), req=request))
        request.last_node = request.found.last_device_node
        return request

    def admit(self, request: Any) -> int:
        """Tokens that are queued to be loaded for it."""
        found = request.found
        arguments = InitLoadBackParams(found.best_match_node, found.host_hit_length, req=request)
        return self.cache.init_load_back(arguments)[0]

    def loaded(self, request: Any) -> np.ndarray:
        """The KV in the slots that are the request's own, when the batch's loads are over."""
        slots = self.cache.linker.private_load_indices[request.rid]
        self.cache.ready_to_load_host_cache()
        assert self.cache.linker.finish_loads() == []
        return self._rows_of_device(slots)

    def close(self) -> None:
        self.cache.linker.close()
        self._unwind()


@pytest.fixture
def revision(request: pytest.FixtureRequest) -> str:
    return request.node.nodeid


@pytest.fixture
def rig(shared_daemon: Daemon, revision: str) -> Iterator[LinkerRig]:
    with LinkerRig(Model(), shared_daemon.address, revision) as rig:
        yield rig


@pytest.mark.parametrize("core", ["rust", "python"])
@pytest.mark.parametrize("kind", ["mha", "mla"])
def test_every_byte_comes_back(kind: str, core: str, shared_daemon: Daemon, revision: str) -> None:
    model = Model(kind)
    kv = kv_of(model, TOKENS)
    with LinkerRig(model, shared_daemon.address, revision, core=core) as rig:
        rig.compute(TOKENS, kv)
        rig.forget()
        request = rig.look("a", TOKENS)
        assert (request.found.device_prefix_len, request.found.host_hit_length) == (0, 96)
        assert rig.admit(request) == 96
        assert np.array_equal(rig.loaded(request), kv[:96])
    with LinkerRig(model, shared_daemon.address, revision, core=core) as successor:
        request = successor.look("a", TOKENS)
        assert successor.admit(request) == 96, "an engine that is started anew"
        assert np.array_equal(successor.loaded(request), kv[:96])


def test_what_the_device_has_is_not_loaded(rig: LinkerRig) -> None:
    kv = kv_of(rig.model, TOKENS)
    rig.compute(TOKENS, kv)
    assert rig.look("a", TOKENS).found.host_hit_length == 0
    rig.forget()
    rig.compute(TOKENS[:32], kv)
    request = rig.look("a", TOKENS)
    assert (request.found.device_prefix_len, request.found.host_hit_length) == (32, 64)
    assert rig.admit(request) == 64
    assert np.array_equal(rig.loaded(request), kv[32:96])


def test_requests_of_one_batch_and_one_that_is_taken_back(rig: LinkerRig) -> None:
    for tokens in (TOKENS, OTHERS):
        rig.compute(tokens, kv_of(rig.model, tokens))
    rig.forget()
    first, second = rig.look("a", TOKENS), rig.look("b", OTHERS)
    assert (rig.admit(first), rig.admit(second)) == (96, 64)
    rig.cache.linker.release_request("a")
    assert np.array_equal(rig.loaded(second), kv_of(rig.model, OTHERS))
    rig.forget()
    assert rig.look("c", TOKENS).found.host_hit_length == 96, "the node keeps what the engine forgets"


def test_what_is_asked_and_what_is_declined_is_on_sglangs_metrics(rig: LinkerRig) -> None:
    def counted(verb: str, outcome: str) -> float:
        labels = {"tp_rank": "0", "dp_rank": "0", "pp_rank": "0", "attn_cp_rank": "0", "verb": verb, "outcome": outcome}
        return REGISTRY.get_sample_value(f"{NAME}_total", labels) or 0.0

    names = [("put", "ok"), ("exists", "ok"), ("load", "not_held")]
    before = [counted(*name) for name in names]
    rig.compute(TOKENS, kv_of(rig.model, TOKENS))
    rig.forget()
    request = rig.look("a", TOKENS)
    while rig.cache.linker.cache_linker._linker._found:
        rig.cache.linker.cache_linker._linker._forget_oldest()
    assert rig.admit(request) == 0
    rig.settle()
    assert [counted(*name) - first for name, first in zip(names, before, strict=True)] == [6, 6, 6]


def test_ranks_are_refused(shared_daemon: Daemon, revision: str) -> None:
    with pytest.raises(ValueError, match="engines of one rank are supported, this one has 2"):
        LinkerRig(Model(), shared_daemon.address, revision, ranks=2)
