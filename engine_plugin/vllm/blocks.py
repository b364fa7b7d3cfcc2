"""Where the blocks of a vLLM engine lie, as far as copies need to know: one contiguous run per layer and block.

What is inside a block is the engine's business (on a CPU: per head all K rows, then all V rows, packed for the
instruction set), so blocks are copied whole or not at all. What cannot be copied like that is refused here, once.

    BlocksUnusable (ValueError)   these tensors cannot be cached; says why
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
from cachekernels.paged_copy import PoolLayout

from engine_plugin.vllm.metadata import WorkerShape

if TYPE_CHECKING:
    import torch

KNOWN_LAYOUTS = ("LBHNC",)
"""Layouts of vLLM in which a block of a layer is one run. On a GPU others may be, which nobody has tried."""

Rank = tuple[int, int]
"""(pipeline rank, tensor rank)."""


class BlocksUnusable(ValueError):
    """The engine keeps its KV in a way that is not known here."""


@dataclass(frozen=True)
class EngineBlocks:
    """The blocks of one rank, ready for native copies. `tensors` are kept alive."""

    layout: PoolLayout
    layer_names: tuple[str, ...]
    tensors: tuple[torch.Tensor, ...]


def find_blocks(kv_caches: Mapping[str, torch.Tensor], num_blocks: int, layout_name: str) -> EngineBlocks:
    """The blocks behind the tensors that vLLM registers, layers in vLLM's order. BlocksUnusable.

    Layers that share one tensor (cross-layer KV sharing) count once.
    """
    if layout_name not in KNOWN_LAYOUTS:
        raise BlocksUnusable(f"KV cache layout {layout_name}, known: {', '.join(KNOWN_LAYOUTS)}")
    if num_blocks < 1 or not kv_caches:
        raise BlocksUnusable("there is no KV cache")
    layers: dict[int, tuple[str, torch.Tensor]] = {}
    for name, tensor in kv_caches.items():
        _check_tensor(name, tensor, num_blocks)
        known = layers.setdefault(tensor.data_ptr(), (name, tensor))[1]
        if known.nbytes != tensor.nbytes:
            raise BlocksUnusable(f"layers {name} and {layers[tensor.data_ptr()][0]} overlap in memory")
    sizes = {tensor.nbytes for _, tensor in layers.values()}
    if len(sizes) > 1:
        raise BlocksUnusable(f"layers differ in size: {', '.join(f'{size} bytes' for size in sorted(sizes))}")
    layer_bytes = sizes.pop()
    for here, after in pairwise(sorted(layers)):
        if here + layer_bytes > after:
            raise BlocksUnusable(f"layers {layers[here][0]} and {layers[after][0]} overlap in memory")
    pool = PoolLayout(np.array(list(layers), np.uint64), layer_bytes // num_blocks, num_blocks, len(layers))
    names, tensors = zip(*layers.values(), strict=True)
    return EngineBlocks(pool, names, tensors)


def _check_tensor(name: str, tensor: torch.Tensor, num_blocks: int) -> None:
    if not hasattr(tensor, "data_ptr"):  # a list of tensors: recurrent state
        raise BlocksUnusable(f"layer {name} is no tensor but {type(tensor).__name__}")
    if tensor.device.type != "cpu":
        raise BlocksUnusable(f"layer {name} lies on {tensor.device}; only memory of the CPU can be copied")
    if not tensor.is_contiguous() or tensor.shape[0] % num_blocks or not tensor.nbytes:
        raise BlocksUnusable(
            f"layer {name}: shape {list(tensor.shape)}, strides {list(tensor.stride())} are not {num_blocks} adjacent "
            "contiguous blocks"
        )


def frame_offsets(shapes: Mapping[Rank, WorkerShape]) -> dict[Rank, int]:
    """Where in a frame each rank's part begins, in bytes: side by side, ranks that hold the same bytes on one place."""
    offsets: dict[Rank, int] = {}
    end = 0
    for pp_rank, tp_rank in sorted(shapes):
        shape = shapes[pp_rank, tp_rank]
        first = (pp_rank, tp_rank - tp_rank % shape.num_replicas)
        if first in offsets:
            offsets[pp_rank, tp_rank] = offsets[first]
        else:
            offsets[pp_rank, tp_rank] = end
            end += shape.page_bytes
    return offsets


def frame_bytes(shapes: Mapping[Rank, WorkerShape]) -> int:
    """Bytes of a frame that holds the parts of all ranks."""
    return sum(shape.page_bytes for shape in distinct_parts(shapes))


def distinct_parts(shapes: Mapping[Rank, WorkerShape]) -> Sequence[WorkerShape]:
    """The shapes of the ranks whose parts differ, in the order in which they lie in a frame."""
    return [shapes[rank] for rank in sorted(shapes) if rank[1] % shapes[rank].num_replicas == 0]
