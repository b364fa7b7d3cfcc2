"""Sizes of the tiers in memory: from flags, tokens and what is left."""

from __future__ import annotations

import pytest
from cachekernels.system_memory import AvailableMemory

from engine_plugin.engine.args import parse_args
from engine_plugin.engine.sizing import DEFAULT_POOL_CONTEXTS, StartupError, plan_memory

GIB = 2**30
HAVE = AvailableMemory(have_bytes=8 * GIB, reserve_bytes=GIB, source="a test")
TOKEN_BYTES = 1024
CONTEXT = 2048


def test_the_pool_is_what_was_asked_for_in_whole_pages() -> None:
    plan = plan_memory(parse_args(["--max-total-tokens", "100", "--page-size", "16"]), TOKEN_BYTES, CONTEXT, HAVE)
    assert (plan.num_pages, plan.num_frames, plan.device_bytes, plan.host_bytes) == (6, 0, 6 * 16 * 1024, 0)


def test_by_default_it_holds_a_few_contexts() -> None:
    plan = plan_memory(parse_args([]), TOKEN_BYTES, CONTEXT, HAVE)
    assert plan.num_pages == DEFAULT_POOL_CONTEXTS * CONTEXT


def test_by_default_it_takes_no_more_than_a_quarter() -> None:
    plan = plan_memory(parse_args([]), 2**20, CONTEXT, HAVE)
    assert plan.device_bytes == 2 * GIB


def test_frames_count_as_they_lie_in_memory() -> None:
    argv = ["--max-total-tokens", "100", "--enable-hierarchical-cache"]
    plan = plan_memory(parse_args(argv), TOKEN_BYTES, CONTEXT, HAVE)
    assert (plan.num_frames, plan.host_bytes) == (200, 200 * 4096)
    plan = plan_memory(parse_args([*argv, "--hicache-size", "0.001"]), TOKEN_BYTES, CONTEXT, HAVE)
    assert plan.num_frames == 10**6 // 4096


@pytest.mark.parametrize(
    ("argv", "fits"),
    [
        (["--max-total-tokens", str(7 * 2**20)], True),
        (["--max-total-tokens", str(7 * 2**20 + 1)], False),
        (["--max-total-tokens", str(2**20), "--page-size", "4", "--enable-hicache", "--hicache-ratio", "6"], True),
        (["--max-total-tokens", str(2**20), "--page-size", "4", "--enable-hicache", "--hicache-ratio", "6.1"], False),
    ],
)
def test_device_and_host_together_must_leave_the_reserve(argv: list[str], fits: bool) -> None:
    args = parse_args(argv)
    if fits:
        plan_memory(args, TOKEN_BYTES, CONTEXT, HAVE)
        return
    with pytest.raises(
        StartupError, match=r"need 7\S* GiB \(device .*, host .*\), have 8 GiB \(a test\), reserve 1 GiB"
    ):
        plan_memory(args, TOKEN_BYTES, CONTEXT, HAVE)


def test_host_memory_of_a_daemon_is_not_this_process_to_refuse() -> None:
    argv = ["--max-total-tokens", str(2**20), "--page-size", "4", "--enable-hicache", "--hicache-ratio", "60"]
    plan = plan_memory(parse_args([*argv, "--cachesvc-address", "unix:///run/node.sock"]), TOKEN_BYTES, CONTEXT, HAVE)
    assert plan.host_bytes > HAVE.have_bytes


@pytest.mark.parametrize(
    "argv",
    [
        ["--max-total-tokens", str(2**63 - 1)],
        ["--max-total-tokens", str(2**62), "--enable-hicache", "--hicache-ratio", "1e6"],
        ["--max-total-tokens", "100", "--enable-hicache", "--hicache-size", "1e9"],
    ],
)
def test_whatever_is_asked_for_the_refusal_stays_readable(argv: list[str]) -> None:
    with pytest.raises(StartupError) as refused:
        plan_memory(parse_args(argv), TOKEN_BYTES, CONTEXT, HAVE)
    assert len(str(refused.value)) < 200


def test_small_sizes_are_not_shown_as_nothing() -> None:
    plan = plan_memory(parse_args(["--max-total-tokens", "100"]), TOKEN_BYTES, CONTEXT, HAVE)
    assert plan.describe() == "need 100 KiB (device 100 KiB, host 0 B), have 8 GiB (a test), reserve 1 GiB"
