"""What SGLang lacks on a machine without a GPU, so that tests run its real server, tree, controller and host pools. For
tests alone.

DESIGN. Nothing of SGLang's logic is replaced: the copies between device and host pool, which are GPU kernels there, are
tensor assignments here; streams and events, which order those kernels, order nothing, because every copy is over when
its call returns; host memory is not registered with a driver. Besides, CPU attention computes the new rows only, where
SGLang's computes one row for each token of the prompt, cached or not, so that a hit is as much quicker as on a GPU.

`install` is for the tests' own process. A server's processes have this folder on their path and find `plugin` through
the entry point beside this file, as any plug-in of SGLang is found; no file of SGLang is changed.
"""

from __future__ import annotations

import importlib
import logging
import sys
from collections.abc import Callable
from typing import Any

import torch

POOLS = "sglang.srt.mem_cache.pool_host"


class NoEvent:
    """A device event on a machine whose copies are over when they return."""

    def __init__(self, enable_timing: bool = False) -> None:
        del enable_timing

    def record(self, stream: object = None) -> None:
        del stream

    def wait(self, stream: object = None) -> None:
        del stream

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        return None

    def elapsed_time(self, other: object) -> float:
        del other
        return 0.0


def patch_torch() -> None:
    """Events and what streams lack in `torch.cpu`."""
    torch.cpu.Event = NoEvent  # type: ignore[attr-defined]
    torch.cpu.Stream.synchronize = lambda self: None  # type: ignore[attr-defined]
    torch.cpu.Stream.wait_stream = lambda self, other: None  # type: ignore[attr-defined]


def rows_of_layer(buffer: torch.Tensor, layout: str, layer: int) -> torch.Tensor:
    """One layer of one buffer (K, V or MLA's) of a host pool, as a view by token, or by page and token."""
    if layout == "layer_first":
        return buffer[layer]
    if layout in ("page_first", "page_first_direct"):
        return buffer[:, layer]
    if layout == "page_head":  # pages, heads, tokens, layers, dim
        return buffer[:, :, :, layer].transpose(1, 2)
    raise ValueError(f"host layout {layout!r}: expected layer_first, page_first, page_first_direct or page_head")


def _at(rows: torch.Tensor, layout: str, slots: torch.Tensor, page_size: int) -> Any:
    return slots if layout in ("layer_first", "page_first") else (slots // page_size, slots % page_size)


def mha_backup(self: Any, device_pool: Any, host_indices: Any, device_indices: Any, io_backend: str) -> None:
    """`MHATokenToKVPoolHost.backup_from_device_all_layer` without a kernel."""
    del device_pool, io_backend
    for layer in range(self.layer_num):
        for buffer, device in (
            (self.k_buffer, self.device_k_buffers[layer]),
            (self.v_buffer, self.device_v_buffers[layer]),
        ):
            rows = rows_of_layer(buffer, self.layout, layer)
            rows[_at(rows, self.layout, host_indices, self.page_size)] = device[device_indices]


def mha_load(
    self: Any,
    device_pool: Any,
    host_indices: Any,
    device_indices: Any,
    layer_id: int,
    io_backend: str,
    *,
    is_draft: bool = False,
) -> None:
    """`MHATokenToKVPoolHost.load_to_device_per_layer` without a kernel."""
    del device_pool, io_backend
    if not is_draft and not 0 <= layer_id < self.target_layer_num:
        return
    for buffer, device in (
        (self.k_buffer, self.device_k_buffers[layer_id]),
        (self.v_buffer, self.device_v_buffers[layer_id]),
    ):
        rows = rows_of_layer(buffer, self.layout, layer_id)
        device[device_indices] = rows[_at(rows, self.layout, host_indices, self.page_size)]


def mla_backup(self: Any, device_pool: Any, host_indices: Any, device_indices: Any, io_backend: str) -> None:
    """`MLATokenToKVPoolHost.backup_from_device_all_layer` without a kernel."""
    del device_pool, io_backend
    for layer in range(self.layer_num):
        rows = rows_of_layer(self.kv_buffer, self.layout, layer)
        at = _at(rows, self.layout, host_indices, self.page_size)
        rows[at] = self.device_kv_buffers[layer][device_indices]


def mla_load(
    self: Any,
    device_pool: Any,
    host_indices: Any,
    device_indices: Any,
    layer_id: int,
    io_backend: str,
    *,
    is_draft: bool = False,
) -> None:
    """`MLATokenToKVPoolHost.load_to_device_per_layer` without a kernel."""
    del device_pool, io_backend
    if not is_draft and not 0 <= layer_id < self.target_layer_num:
        return
    rows = rows_of_layer(self.kv_buffer, self.layout, layer_id)
    at = _at(rows, self.layout, host_indices, self.page_size)
    self.device_kv_buffers[layer_id][device_indices] = rows[at]


def state_backup(self: Any, device_pool: Any, host_indices: Any, device_indices: Any, io_backend: str = "") -> None:
    """`MambaPoolHost.backup_from_device_all_layer` without a kernel: host rows are slot, layer, 1, state."""
    del device_pool, io_backend
    for host, layers in _states(self):
        for layer, device in enumerate(layers):
            host[host_indices, layer, 0] = device[device_indices]
    self._transfer_slot_states(host_indices, device_indices, to_device=False)


def state_load(
    self: Any,
    device_pool: Any,
    host_indices: Any,
    device_indices: Any,
    layer_id: int,
    io_backend: str = "",
    *,
    is_draft: bool = False,
) -> None:
    """`MambaPoolHost.load_to_device_per_layer` without a kernel."""
    del device_pool, io_backend, is_draft
    if layer_id == 0:
        self._transfer_slot_states(host_indices, device_indices, to_device=True)
    for host, layers in _states(self):
        layers[layer_id][device_indices] = host[host_indices, layer_id, 0]


def _states(pool: Any) -> list[tuple[torch.Tensor, list[torch.Tensor]]]:
    """(host buffer, device layers) of each kind of state."""
    kinds = [(pool.temporal_buffer, pool.temporal_device_layers)]
    return [*kinds, *zip(pool.conv_buffer, pool.conv_device_layers, strict=True)]


def indexer_backup(self: Any, device_pool: Any, host_indices: Any, device_indices: Any, io_backend: str) -> None:
    """`DSAIndexerPoolHost.backup_from_device_all_layer` without a kernel."""
    del device_pool, io_backend
    host, device = self._get_indexer_page_indices(host_indices, device_indices)
    for layer, buffer in enumerate(self.packed_device_index_buffers):
        rows_of_layer(self.index_k_with_scale_buffer, self.layout, layer).flatten(1)[host] = buffer[device]


def indexer_load(
    self: Any,
    device_pool: Any,
    host_indices: Any,
    device_indices: Any,
    layer_id: int,
    io_backend: str,
    *,
    is_draft: bool = False,
) -> None:
    """`DSAIndexerPoolHost.load_to_device_per_layer` without a kernel, of a model without a draft."""
    del io_backend
    assert not is_draft
    host, device = self._get_indexer_page_indices(host_indices, device_indices)
    rows = rows_of_layer(self.index_k_with_scale_buffer, self.layout, self._host_layer_index(layer_id))
    device_pool.index_k_with_scale_buffer[layer_id][device] = rows.flatten(1)[host]


def not_registered(*_: Any) -> None:
    """`_cuda_host_register`: there is no driver to tell."""


REPLACED: dict[str, Callable[..., Any]] = {
    f"{POOLS}.mha.MHATokenToKVPoolHost.backup_from_device_all_layer": mha_backup,
    f"{POOLS}.mha.MHATokenToKVPoolHost.load_to_device_per_layer": mha_load,
    f"{POOLS}.mla.MLATokenToKVPoolHost.backup_from_device_all_layer": mla_backup,
    f"{POOLS}.mla.MLATokenToKVPoolHost.load_to_device_per_layer": mla_load,
    f"{POOLS}.mamba.MambaPoolHost.backup_from_device_all_layer": state_backup,
    f"{POOLS}.mamba.MambaPoolHost.load_to_device_per_layer": state_load,
    f"{POOLS}.dsa.DSAIndexerPoolHost.backup_from_device_all_layer": indexer_backup,
    f"{POOLS}.dsa.DSAIndexerPoolHost.load_to_device_per_layer": indexer_load,
    f"{POOLS}.common._cuda_host_register": not_registered,
}


def attend_new_rows(
    self: Any,
    query: torch.Tensor,
    output: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    req_to_token: torch.Tensor,
    req_pool_indices: torch.Tensor,
    seq_lens: torch.Tensor,
    extend_prefix_lens: torch.Tensor,
    extend_seq_lens: torch.Tensor,
    encoder_lens: torch.Tensor | None = None,
    scaling: float | None = None,
    enable_gqa: bool = False,
    causal: bool = False,
    is_cross_attn: bool = False,
    sliding_window_size: int | None = None,
) -> torch.Tensor:
    """`TorchNativeAttnBackend._run_sdpa_forward_extend` for causal self-attention: query rows of new tokens alone."""
    assert causal and not is_cross_attn and encoder_lens is None and sliding_window_size in (None, -1)
    first = 0
    for index, (length, known, new) in enumerate(
        zip(seq_lens.tolist(), extend_prefix_lens.tolist(), extend_seq_lens.tolist(), strict=True)
    ):
        slots = req_to_token[req_pool_indices[index], :length]
        rows = slice(first, first + new)
        sees = torch.ones(new, length, dtype=torch.bool).tril(diagonal=known)
        output[rows] = torch.nn.functional.scaled_dot_product_attention(
            query[rows].movedim(0, 1),
            k_cache[slots].movedim(0, 1).to(query.dtype),
            v_cache[slots].movedim(0, 1).to(query.dtype),
            attn_mask=sees,
            scale=scaling,
            enable_gqa=enable_gqa,
        ).movedim(0, 1)
        first += new
    return output


ATTENTION = "sglang.srt.layers.attention.torch_native_backend.TorchNativeAttnBackend._run_sdpa_forward_extend"


REPORT = "REPORTED "
WATCHED = ("cachesvc", "engine_plugin", "sglang", "storage_backends")


class Reports(logging.Handler):
    """Prints warnings and errors a second time, with level and logger, which SGLang's own format leaves out."""

    def emit(self, record: logging.LogRecord) -> None:
        said = record.getMessage().replace("\n", " ")
        print(f"{REPORT}{record.levelname} {record.name}: {said}", file=sys.stderr, flush=True)


def watch_logs() -> None:
    """At the loggers themselves: SGLang replaces what the root logger has."""
    reports = Reports(logging.WARNING)
    for name in WATCHED:
        logging.getLogger(name).addHandler(reports)


def plugin() -> None:
    """The entry point: runs in every process of a server."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    patch_torch()
    watch_logs()
    for target, replacement in {**REPLACED, ATTENTION: attend_new_rows}.items():
        HookRegistry.register(target, replacement, HookType.REPLACE)
    for pool in ("mha.MHATokenToKVPoolHost", "mla.MLATokenToKVPoolHost"):
        HookRegistry.register(f"{POOLS}.{pool}.__init__", not_pinned, HookType.BEFORE)


def not_pinned(*args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Host pools in plain memory: SGLang allocates pinned pages by this mark."""
    return args, {**kwargs, "pin_memory": False}


def install() -> None:
    """Once, before the first cache is made in this process."""
    patch_torch()

    for path, replacement in REPLACED.items():
        module, _, name = path.rpartition(".")
        try:
            owner: Any = importlib.import_module(module)
        except ModuleNotFoundError:
            module, _, class_name = module.rpartition(".")
            owner = getattr(importlib.import_module(module), class_name)
        assert callable(getattr(owner, name)), path
        setattr(owner, name, replacement)
