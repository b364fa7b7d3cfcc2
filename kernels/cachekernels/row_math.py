"""A transformer's products, norms and attention whose rows do not depend on each other, on the CPU in float32.

The property, which callers build on: what is computed for a row (a token) is the same in every bit whatever rows come
with it, however the work is cut into calls, pages and threads, and whichever instruction set runs it. Each output
element is one chain of operations in a fixed order: k ascending in a product, key position ascending in attention. So
the KV of a token does not depend on chunk boundaries, on the batch, or on whether a prefix was computed or loaded.
(How it is built, and what decides the bits: host/row_kernels.hpp.)

Arrays are numpy, float32, C-contiguous; outputs are the caller's and are overwritten. Every call is one native call
that releases the GIL, works on the object's threads (the caller's among them), and returns when done. A wrong shape or
dtype raises ValueError or TypeError before anything is done. Several callers of one RowMath take turns.

    RowMath(num_threads, instructions)   instructions: "auto" (the widest here), or one of supported_instructions()
      .pack(weight [n, k]) -> PackedMatrix             a copy of its own, laid out for these instructions
      .linear(x [rows, k], packed, out [rows, n], accumulate)   out = x W^T, or out += that
      .rms_norm(x [rows, width], weight [width], epsilon, out)
      .silu_and_multiply(x [rows, 2 * width], out [rows, width])   silu(first half) * second half
      .rotary_and_store(qkv, batch, pool, cosines, sines, num_heads)
            qkv [rows, (num_heads + 2 * kv_heads) * head_dim]: q and k are rotated in place (first half of a head with
            the second), then k and v go to the batch's slots of the pool, rounded to its type, nearest even
      .attention(qkv, batch, pool, num_heads, scale, out [rows, num_heads * head_dim])
            causal, over positions [0, p] of the row's sequence as they lie in the pool

    RowBatch(row_offsets, starts, table_offsets, page_tables, page_size, num_pages)
            sequence s: rows [row_offsets[s], row_offsets[s + 1]) at positions from starts[s] on, KV in the pages
            page_tables[table_offsets[s] : table_offsets[s + 1]]. ValueError: a sequence without rows, a negative start,
            a page table too short, a page outside the pool
      .last_rows(sequences) -> RowBatch   of the last row of each of these sequences
      .last_row_numbers(sequences) -> int64 [n]   which rows of this batch those are
      .positions(), .slots() -> int64 [rows];  .row_counts() -> int64 [sequences]
      .context_slots(sequence) -> int64 [its end], slots of positions from 0 on

    PoolLayer(keys, values, num_slots, num_kv_heads, head_dim, type)
            addresses of one layer's K and V, [num_slots, kv_heads, head_dim] each; the caller keeps them alive.
            head_dim is a multiple of 32, widths are multiples of 16
"""

from cachekernels._core import KvType, PackedMatrix, PoolLayer, RowBatch, RowMath, supported_row_instructions

__all__ = ["KvType", "PackedMatrix", "PoolLayer", "RowBatch", "RowMath", "supported_instructions"]


def supported_instructions() -> list[str]:
    """Instruction sets this machine can run, widest first; the last is always "portable"."""
    return supported_row_instructions().split()
