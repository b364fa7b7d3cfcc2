"""The connector, watched: a checksum of every block that is stored and of every block that was loaded.

DESIGN. It stands outside of the connector and asks vLLM itself which tokens a block holds: the block pool knows the
hash of a block that is stored, the request those of the blocks that are loaded for it. So it also finds a page that is
whole but another one's. Checksums are of the engine's own tensors, all layers, taken where the copy begins (after the
forward that computed the block) and where the load has ended (before anybody reads it), and appended to a file.

`HARM`, a file beside them, says what is done to loaded blocks before that: `scale`, `swap` or `zero`. A test that
claims to see a wrong page is given one.

Engines load it by `kv_connector_module_path`; the folder is named by the environment.
"""

from __future__ import annotations

import json
import os
import pickle
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata
from xxhash import xxh3_128_hexdigest

from engine_plugin.vllm.connector import CachesvcConnector
from engine_plugin.vllm.metadata import LoadOp
from tests.engines.wheel import foreign_packages

FOLDER = "CACHESVC_TEST_SPY"
LABEL = "CACHESVC_TEST_LABEL"
"""Environment: where to write, and a name for everything that two engines must have in common to share pages."""
HARM = "harm"


@dataclass
class Spied(KVConnectorMetadata):
    """The connector's own metadata, and the hashes of the blocks in it."""

    inner: KVConnectorMetadata
    hashes: Mapping[int, str]


class SpyingConnector(CachesvcConnector):
    def __init__(self, *arguments: Any, **named: Any) -> None:
        folder = Path(os.environ[FOLDER])
        folder.mkdir(parents=True, exist_ok=True)
        self._harm = folder / HARM
        self._path = folder / f"{os.getpid()}-{id(self)}.jsonl"
        super().__init__(*arguments, **named)
        self._hashes: dict[str, dict[int, str]] = {}
        self._loading: dict[int, tuple[LoadOp, dict[int, str]]] = {}
        self._spied: Spied | None = None
        self._say(what="packages", role=self.role.name, foreign=foreign_packages())

    # ---- scheduler

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        super().bind_gpu_block_pool(gpu_block_pool)
        self._pool = gpu_block_pool

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        super().update_state_after_alloc(request, blocks, num_external_tokens)
        ids = blocks.get_block_ids()[0]
        self._hashes[request.request_id] = {
            block: page_hash.hex() for block, page_hash in zip(ids, request.block_hashes, strict=False)
        }

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        inner = super().build_connector_meta(scheduler_output)
        hashes: dict[int, str] = {}
        for load in inner.work.loads:
            known = self._hashes[load.request_id]
            hashes |= {block: known[block] for block in load.blocks.tolist()}
        for store in inner.work.stores:
            hashes |= {block: self._hash_of(block) for block in store.blocks.tolist()}
        return Spied(pickle.loads(pickle.dumps(inner)), hashes)  # an engine in one process would hand it over as it is

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> Any:
        self._hashes.pop(request.request_id, None)
        return super().request_finished_all_groups(request, block_ids)

    def _hash_of(self, block: int) -> str:
        with_group = self._pool.blocks[block].block_hash
        return "none" if with_group is None else bytes(with_group)[:32].hex()

    # ---- worker

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        super().register_kv_caches(kv_caches)
        self._caches = [kv_caches[name] for name in sorted(kv_caches)]

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        assert isinstance(kv_connector_metadata, Spied)
        super().handle_preemptions(kv_connector_metadata.inner)

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        assert isinstance(connector_metadata, Spied)
        self._spied = connector_metadata
        for load in connector_metadata.inner.work.loads:
            of_load = {block: connector_metadata.hashes[block] for block in load.blocks.tolist()}
            self._loading[load.op] = (load, of_load)
        super().bind_connector_metadata(connector_metadata.inner)

    def wait_for_save(self) -> None:
        assert self._spied is not None
        for store in self._spied.inner.work.stores:
            self._record("stored", store.blocks.tolist(), self._spied.hashes)
        super().wait_for_save()

    def build_connector_worker_meta(self) -> Any:
        results = super().build_connector_worker_meta()
        for op, result in ({} if results is None else results.results.ended).items():
            if op in self._loading:
                load, hashes = self._loading.pop(op)
                good = load.blocks[result.good].tolist()
                harm = self._do_harm(good)
                self._record("loaded", good, hashes, harm=harm)
        return results

    def _record(self, what: str, blocks: Iterable[int], hashes: Mapping[int, str], harm: str = "") -> None:
        for block in blocks:
            parts = [cache[block].contiguous().view(torch.uint8).numpy().tobytes() for cache in self._caches]
            self._say(what=what, hash=hashes[block], digest=xxh3_128_hexdigest(b"".join(parts)), harm=harm)

    def _do_harm(self, blocks: list[int]) -> str:
        kind = self._harm.read_text() if self._harm.exists() else ""
        for cache in self._caches if kind else ():
            if kind == "scale":
                cache[blocks] *= 1.5
            elif kind == "zero":
                cache[blocks[0]] = 0
            else:
                cache[[blocks[0], blocks[1]]] = cache[[blocks[1], blocks[0]]]
        return kind

    def _say(self, **what: object) -> None:
        with self._path.open("a") as file:  # opened each time: a connector may end in any way
            file.write(json.dumps({"label": os.environ.get(LABEL, ""), **what}) + "\n")
