"""codec.*: KV of the demo's model on real text, compressed without loss.

1,024 tokens of this repository's own source go through SmolLM2-135M; the 16 pages of 64 tokens are taken as they lie in
frames, in float32 and rounded to bfloat16. `*_ratio` is raw bytes over stored bytes (header not counted), against zstd
without byte planes. put and get go through memory, against the same pages stored as they are.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

import numpy as np
import torch
from cachekernels.paged_copy import pool_to_frames
from numpy.typing import NDArray

import bench
from bench.engine import CHUNK_TOKENS, PAGE_SIZE, PREFILL_TOKENS, contestants
from bench.harness import Measurement, Run, figure
from engine_plugin.engine.batch import ForwardBatch, Sequence
from engine_plugin.engine.loading import load_model
from engine_plugin.engine.runner import ModelRunner
from engine_plugin.engine.sampler import Sampler
from engine_plugin.hicache.base import OpenGate
from engine_plugin.memory.pools import KVPool
from storage_backends.base import Outcome, Segments, StorageBackend
from storage_backends.layers.checksum import ChecksumLayer
from storage_backends.layers.encoded import EncodedLayer, ZstdCompressor
from storage_backends.memory.backend import MemoryBackend
from storage_backends.memory.config import MemoryConfig
from storage_backends.testing.objects import make_ids

Pages = NDArray[np.uint8]
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


@cache
def pages(dtype: str) -> Pages:
    """uint8[16, page_bytes], page-first."""
    both = contestants()
    tokenizer = load_model().tokenizer
    assert tokenizer is not None
    text = "".join(path.read_text() for path in sorted(Path(bench.__file__).parent.glob("*.py")))
    tokens = np.asarray(tokenizer.encode(text)[:PREFILL_TOKENS], np.uint32)
    pool = KVPool(both.config.kv_shape(torch.float32), PREFILL_TOKENS // PAGE_SIZE, PAGE_SIZE)
    runner = ModelRunner(both.model, pool, Sampler(0))
    table = np.arange(pool.num_pages, dtype=np.int32)
    for start in range(0, PREFILL_TOKENS, CHUNK_TOKENS):
        chunk = Sequence(tokens[start : start + CHUNK_TOKENS], start, table)
        runner.forward(ForwardBatch([chunk], OpenGate()))
    rows = np.zeros((pool.num_pages, pool.page_bytes), np.uint8)
    pool_to_frames(pool.layout(), table, rows.ctypes.data, rows.shape[1], table)
    values = torch.from_numpy(rows.view(np.float32)).to(DTYPES[dtype])
    return values.contiguous().view(torch.uint8).numpy().reshape(len(rows), -1)


def _ratio(dtype: str) -> Measurement:
    rows, compressor = pages(dtype), ZstdCompressor()
    with_planes = MemoryBackend(MemoryConfig(2**30))
    ids = make_ids(len(rows))
    EncodedLayer(with_planes, bytes(32), compressor).put_from(ids, Segments.of_rows(rows))
    stored = int(with_planes.sizes(ids).sum()) - 128 * len(rows)
    plain = sum(len(row) for row in compressor.compress(rows))
    return Run().of([rows.size / stored], [rows.size / plain])


@figure("codec.ratio_bf16", unit="x", target="", reference="zstd without byte planes")
def ratio_bf16(run: Run) -> Measurement:
    return _ratio("bf16")


@figure("codec.ratio_fp32", unit="x", target="", reference="zstd without byte planes")
def ratio_fp32(run: Run) -> Measurement:
    return _ratio("fp32")


class Fresh:
    """Stores and reads the same pages under new names."""

    def __init__(self, layer: StorageBackend, rows: Pages) -> None:
        self.layer, self.rows = layer, rows
        self.target = np.zeros_like(rows)
        self.batch = 0

    def put(self) -> None:
        self.batch += 1
        self.ids = make_ids(len(self.rows), self.batch)
        assert (self.layer.put_from(self.ids, Segments.of_rows(self.rows)) == Outcome.OK).all()

    def get(self) -> None:
        assert (self.layer.get_into(self.ids, Segments.of_rows(self.target)) == Outcome.OK).all()


def _contestants(dtype: str) -> tuple[Fresh, Fresh]:
    rows = pages(dtype)
    packed = EncodedLayer(MemoryBackend(MemoryConfig(8 * rows.size)), bytes(32), ZstdCompressor())
    plain = ChecksumLayer(MemoryBackend(MemoryConfig(8 * rows.size)), bytes(32))
    both = Fresh(packed, rows), Fresh(plain, rows)
    for one in both:
        one.put()
    return both


@figure("codec.put_bf16", unit="GB/s", target="", reference="the same pages stored as they are")
def put_bf16(run: Run) -> Measurement:
    packed, plain = _contestants("bf16")
    return run.paired_rate(packed.put, plain.put, amount=packed.rows.size, scale=1e-9)


@figure("codec.get_bf16", unit="GB/s", target="", reference="the same pages stored as they are")
def get_bf16(run: Run) -> Measurement:
    packed, plain = _contestants("bf16")
    result = run.paired_rate(packed.get, plain.get, amount=packed.rows.size, scale=1e-9)
    assert np.array_equal(packed.target, packed.rows)
    return result
