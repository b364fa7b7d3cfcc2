"""Paged attention in plain torch: writes a batch's keys and values to their slots, gathers each sequence's, attends."""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own name for it
from cachekernels.row_math import RowBatch


class PagedAttention:
    """One batch's view of any layer's pool: the slots, found once."""

    def __init__(self, batch: RowBatch) -> None:
        self._slots = torch.from_numpy(batch.slots())
        self._num_rows = batch.row_counts().tolist()
        self._query_positions = torch.split(torch.from_numpy(batch.positions()), self._num_rows)
        self._context_slots = [torch.from_numpy(batch.context_slots(s)) for s in range(batch.num_sequences)]

    def store(self, pool: torch.Tensor, rows: torch.Tensor) -> None:
        """pool [slots, heads, dim]; rows [tokens, heads, dim] go to the batch's slots, rounded to the pool's type."""
        pool.index_copy_(0, self._slots, rows.to(pool.dtype))

    def attend(self, queries: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
        """queries [tokens, heads, dim]; k, v: the layer's pool. Returns [tokens, heads * dim]."""
        outputs = [
            _attend_one(q, k[slots], v[slots], positions, scale)
            for q, slots, positions in zip(
                torch.split(queries, self._num_rows), self._context_slots, self._query_positions, strict=True
            )
        ]
        return torch.cat(outputs).flatten(1)


def _attend_one(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, positions: torch.Tensor, scale: float
) -> torch.Tensor:
    visible = None
    if len(positions) > 1:  # a single query, the last one, sees everything
        visible = torch.arange(len(k))[None, :] <= positions[:, None]
    attended = F.scaled_dot_product_attention(
        q.transpose(0, 1)[None],
        k.to(q.dtype).transpose(0, 1)[None],
        v.to(q.dtype).transpose(0, 1)[None],
        attn_mask=visible,
        scale=scale,
        enable_gqa=q.shape[1] != k.shape[1],
    )
    return attended[0].transpose(0, 1)


def rotate(heads: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor) -> torch.Tensor:
    """Rotary embedding of [tokens, heads, dim], halves against each other; cosines, sines [tokens, dim / 2]."""
    first, second = heads.chunk(2, dim=-1)
    cosines, sines = cosines[:, None, :], sines[:, None, :]
    return torch.cat((first * cosines - second * sines, second * cosines + first * sines), dim=-1)
