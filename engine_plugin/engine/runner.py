"""Runs the model for a scheduler: batches in, logits or tokens out."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from cachekernels.row_math import RowBatch

from engine_plugin.engine.batch import ForwardBatch
from engine_plugin.engine.request import Request
from engine_plugin.engine.sampler import Sampler
from engine_plugin.memory.pools import KVPool
from engine_plugin.models.llama import Llama


class ModelRunner:
    """A model on a pool. Belongs to one thread; blocks while it computes, without the GIL.

    What holds about equal bits is the model's to say: see `Llama.is_row_invariant` and the class that computes.
    Raises ValueError when the pool cannot hold this model's KV.
    """

    def __init__(self, model: Llama, pool: KVPool, sampler: Sampler | None = None) -> None:
        self.model = model
        self._pool = pool
        self._forward = model.attach(pool)
        self._sampler = sampler or Sampler()

    def forward(self, batch: ForwardBatch, rows: Sequence[int] | None = None) -> torch.Tensor:
        """Computes the KV of every token of the batch into its slots, and logits of last tokens.

        rows: the sequences whose last token's logits are wanted, in that order; None: all. Returns float32
        [len(rows), vocab], the caller's. Raises ValueError for an empty sequence, a token id outside the vocabulary, a
        position beyond the context, or a page table that is too short or leaves the pool; nothing is written then.
        `LoadFailed` from the gate passes through: the KV of the batch's own slots is undefined then.
        """
        sequences = batch.sequences
        token_ids = np.concatenate([sequence.token_ids for sequence in sequences]).astype(np.int64)
        self._check(token_ids, max(sequence.end for sequence in sequences))
        flat = RowBatch(
            row_offsets=_offsets([len(sequence.token_ids) for sequence in sequences]),
            starts=np.array([sequence.start for sequence in sequences], np.int64),
            table_offsets=_offsets([len(sequence.page_table) for sequence in sequences]),
            page_tables=np.concatenate([sequence.page_table for sequence in sequences]),
            page_size=self._pool.page_size,
            num_pages=self._pool.num_pages,
        )
        return self._forward.run(token_ids, flat, range(len(sequences)) if rows is None else rows, batch.gate)

    def next_tokens(self, batch: ForwardBatch, rows: Sequence[int], requests: Sequence[Request]) -> list[int]:
        """`forward`, then one token for `requests[i]` from sequence `rows[i]`."""
        logits = self.forward(batch, rows)
        return self._sampler.draw(
            logits,
            [request.params for request in requests],
            [self._sampler.seed_of(request.params.seed, request.request_id) for request in requests],
            [request.num_output_tokens for request in requests],
        )

    def _check(self, token_ids: np.ndarray[tuple[int], np.dtype[np.int64]], end: int) -> None:
        config = self.model.config
        if token_ids.max() >= config.vocab_size:
            raise ValueError(f"token id {token_ids.max()}: the vocabulary has {config.vocab_size}")
        if end > config.context_length:
            raise ValueError(f"a sequence ends at position {end}, beyond the context of {config.context_length} tokens")


def _offsets(lengths: Sequence[int]) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    offsets = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=offsets[1:])
    return offsets
