"""Our storage with one thing wrong, to show that the tests would see it. An extra config names the class."""

from __future__ import annotations

from typing import Any

import torch

from engine_plugin.sglang.storage import CachesvcStorage


class _Tampered(CachesvcStorage):  # type: ignore[misc]
    """Changes each batch of pages after it was read into the host pool."""

    def batch_get_v1(self, keys: list[str], host_indices: torch.Tensor, extra_info: Any = None) -> list[bool]:
        found: list[bool] = super().batch_get_v1(keys, host_indices, extra_info)
        if all(found) and len(found) > 1:
            pool = self.mem_pool_host
            starts = [int(index) for index in host_indices[:: pool.page_size]]
            self.tamper(pool, starts)
        return found

    def tamper(self, pool: Any, starts: list[int]) -> None:
        raise NotImplementedError


class OneZeroed(_Tampered):
    def tamper(self, pool: Any, starts: list[int]) -> None:
        pool.set_from_flat_data_page(starts[0], torch.zeros_like(pool.get_data_page(starts[0])))


class TwoSwapped(_Tampered):
    def tamper(self, pool: Any, starts: list[int]) -> None:
        first, second = (pool.get_data_page(start).clone() for start in starts[:2])
        pool.set_from_flat_data_page(starts[0], second)
        pool.set_from_flat_data_page(starts[1], first)


class Scaled(_Tampered):
    def tamper(self, pool: Any, starts: list[int]) -> None:
        for start in starts:
            pool.set_from_flat_data_page(start, pool.get_data_page(start) * 1.5)


class OneByte(_Tampered):
    """The last one of the last page."""

    def tamper(self, pool: Any, starts: list[int]) -> None:
        page = pool.get_data_page(starts[-1]).clone().contiguous()
        page.view(torch.uint8)[-1] ^= 1
        pool.set_from_flat_data_page(starts[-1], page)


class Late(CachesvcStorage):  # type: ignore[misc]
    """Says a page was there that was not read."""

    def batch_get_v1(self, keys: list[str], host_indices: torch.Tensor, extra_info: Any = None) -> list[bool]:
        super().batch_get_v1(keys[:-1], host_indices[: -self.mem_pool_host.page_size], extra_info)
        return [True] * len(keys)
