"""How large the tiers in memory become: the flags, what one token takes, and what the machine has left."""

from __future__ import annotations

from dataclasses import dataclass

from cachekernels.system_memory import AvailableMemory, available_memory

from cachesvc.daemon.summary import size
from engine_plugin.engine.args import EngineArgs
from engine_plugin.hicache.config import PRIVATE

DEFAULT_POOL_CONTEXTS = 4
"""Without --max-total-tokens the device pool holds so many whole contexts, in at most a quarter of the free memory."""

FRAME_ALIGNMENT = 4096


class StartupError(RuntimeError):
    """The flags are right, but it cannot work here."""


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Pages of the device pool and frames of the host region (0 without one), both within what was available."""

    num_pages: int
    num_frames: int
    device_bytes: int
    host_bytes: int
    available: AvailableMemory

    def describe(self) -> str:
        """Need, have and reserve, for a person."""
        return (
            f"need {size(self.device_bytes + self.host_bytes)} (device {size(self.device_bytes)}, host "
            f"{size(self.host_bytes)}), have {size(self.available.have_bytes)} ({self.available.source}), "
            f"reserve {size(self.available.reserve_bytes)}"
        )


def plan_memory(
    args: EngineArgs, token_bytes: int, context_tokens: int, available: AvailableMemory | None = None
) -> MemoryPlan:
    """Sizes for tokens of `token_bytes` in all layers. Checked before anything is allocated: the device pool's memory
    is taken page by page as it is used, so too large a one would end in the kernel killing somebody. Host memory behind
    a daemon's address is the daemon's to check: it may keep this engine's region from before, and that is not missing
    then. Raises StartupError.
    """
    have = available_memory() if available is None else available
    page_bytes = args.page_size * token_bytes
    num_tokens = args.max_total_tokens
    if num_tokens is None:
        num_tokens = min(DEFAULT_POOL_CONTEXTS * context_tokens, have.have_bytes // 4 // token_bytes)
    num_pages = max(1, num_tokens // args.page_size)
    frame_bytes = -(-page_bytes // FRAME_ALIGNMENT) * FRAME_ALIGNMENT
    num_frames = args.host_frames(num_pages, frame_bytes)
    plan = MemoryPlan(num_pages, num_frames, num_pages * page_bytes, num_frames * frame_bytes, have)
    own_bytes = plan.device_bytes + (plan.host_bytes if args.node_address == PRIVATE else 0)
    if own_bytes > have.have_bytes - have.reserve_bytes:
        raise StartupError(f"not enough memory: {plan.describe()}; lower --max-total-tokens, --hicache-ratio or -size")
    return plan
