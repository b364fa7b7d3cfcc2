"""Tokens do not depend on where their prefix came from: bit-equal KV and logits, and controls that must differ.

Everything is compared with one run: the whole sequence in a single forward, alone, in pages of 16. The pools begin full
of NaN, so that reading anything not computed shows at once.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import numpy as np
import pytest
import torch
from cachekernels.paged_copy import frames_to_pool, pool_to_frames
from cachekernels.row_math import RowMath, supported_instructions

from engine_plugin.engine.loading import load_model
from engine_plugin.models.llama import Llama
from engine_plugin.models.random_llama import TINY, random_weights
from engine_plugin.models.row_llama import RowLlama
from tests.helpers.forwards import Bench, Run, assert_same, same_bits

NUM_PROMPT, NUM_OUTPUT = 135, 6
NUM_TOKENS = NUM_PROMPT + NUM_OUTPUT
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@cache
def model_named(name: str) -> Llama:
    return load_model(name, deterministic=True).model


@cache
def tokens_of(name: str) -> np.ndarray:
    """A prompt of random tokens and the model's own greedy continuation, decoded token by token."""
    model = model_named(name)
    tokens = np.random.default_rng(5).integers(0, model.config.vocab_size, NUM_TOKENS).astype(np.uint32)
    bench = Bench(model)
    table = bench.pages(NUM_TOKENS)
    start = 0
    for end in range(NUM_PROMPT, NUM_TOKENS):
        logits = bench.forward((tokens[start:end], start, table))
        tokens[end], start = int(logits.argmax()), end
    return tokens


@cache
def reference(name: str, dtype: torch.dtype = torch.float32) -> Run:
    return Bench(model_named(name), dtype=dtype).run(tokens_of(name))


@pytest.fixture(params=["random:1", "smollm2-135m"])
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


# ---- chunks, pages, decode


@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize(
    "cuts", [[64], [1, 2, 9, 16, 17, 80, 81, 128], [7 * i for i in range(1, 20)]], ids=["64", "ragged", "sevens"]
)
def test_chunks_and_page_sizes_change_no_bit(name: str, page_size: int, cuts: list[int]) -> None:
    run = Bench(model_named(name), page_size=page_size).run(tokens_of(name), cuts)
    assert_same(run, reference(name))


def test_decode_steps_give_the_kv_and_logits_of_a_prefill(name: str) -> None:
    """Prefill the prompt, then one token at a time, against all of it at once, and against each shorter prefill."""
    tokens = tokens_of(name)
    decoded = Bench(model_named(name)).run(tokens, range(NUM_PROMPT, NUM_TOKENS))
    assert_same(decoded, reference(name))
    for end in (NUM_PROMPT, NUM_PROMPT + 3):
        assert_same(Bench(model_named(name)).run(tokens[:end]), Run(decoded.logits, decoded.kv[:, :, :end]))


def test_a_prompt_decoded_from_its_first_token_is_a_prefill() -> None:
    tokens = tokens_of("random:1")
    assert_same(Bench(model_named("random:1")).run(tokens, range(1, NUM_TOKENS)), reference("random:1"))


# ---- company


def test_other_sequences_in_the_batch_change_no_bit(name: str) -> None:
    """The sequence prefills and decodes beside two that prefill and one that decodes, standing first, last, between."""
    model, tokens = model_named(name), tokens_of(name)
    bench = Bench(model, num_tokens=1024)
    table = bench.pages(NUM_TOKENS)
    other = np.random.default_rng(8).integers(0, model.config.vocab_size, 200).astype(np.uint32)
    others = [bench.pages(200) for _ in range(3)]
    bench.forward((other[:90], 0, others[2]))
    logits = {}
    for step, (begin, end) in enumerate([(0, 50), (50, 114), (114, 135), (135, 136), (136, 141)]):
        company = [
            (other[10 * step : 10 * step + 3], 3 * step, others[0]),
            (other[40 * step : 40 * step + 33], 33 * step, others[1]),
            (other[90 + step : 91 + step], 90 + step, others[2]),
        ]
        company.insert(step % 4, (tokens[begin:end], begin, table))
        logits[end] = bench.forward(*company)[step % 4]
    assert_same(Run(logits, bench.kv(table, NUM_TOKENS)), reference(name))


def test_sequences_that_share_a_prefix_s_pages_are_each_as_alone(name: str) -> None:
    model, tokens = model_named(name), tokens_of(name)
    bench = Bench(model)
    table = bench.pages(NUM_TOKENS)
    bench.run(tokens[:96], table=table)
    fork = np.concatenate((table[:6], bench.pages(NUM_TOKENS - 96)))
    other = tokens.copy()
    other[96:] = other[96:][::-1]
    logits = bench.forward((tokens[96:], 96, table), (other[96:], 96, fork))
    assert_same(Run({NUM_TOKENS: logits[0]}, bench.kv(table, NUM_TOKENS)), reference(name))
    assert_same(Run({NUM_TOKENS: logits[1]}, bench.kv(fork, NUM_TOKENS)), Bench(model).run(other))


# ---- a prefix from elsewhere


def moved_prefix(
    bench: Bench, source: Bench, source_table: np.ndarray, num_pages: int, spoil: Callable[[np.ndarray], None]
) -> np.ndarray:
    """A page table in `bench` whose first pages were copied from `source` through frames; `spoil` sees the frames,
    uint8 [pages, page bytes]."""
    frames = np.zeros((num_pages, source.pool.page_bytes), np.uint8)
    numbers = np.arange(num_pages, dtype=np.int32)
    pool_to_frames(
        source.pool.layout(), source_table[:num_pages].copy(), frames.ctypes.data, source.pool.page_bytes, numbers
    )
    spoil(frames)
    table = bench.pages(NUM_TOKENS)
    frames_to_pool(bench.pool.layout(), table[:num_pages].copy(), frames.ctypes.data, bench.pool.page_bytes, numbers)
    return table


def intact(frames: np.ndarray) -> None:
    """Leaves the pages as they were stored."""


def scaled(frames: np.ndarray) -> None:
    frames.view(np.float32)[:] *= 1.5


def swapped(frames: np.ndarray) -> None:
    frames[[0, 1]] = frames[[1, 0]]


def zeroed(frames: np.ndarray) -> None:
    frames[-1] = 0


def one_bit_flipped(frames: np.ndarray) -> None:
    frames[0, 2] ^= 0x10


def resumed(name: str, page_size: int, num_pages: int, spoil: Callable[[np.ndarray], None]) -> Run:
    model, tokens = model_named(name), tokens_of(name)
    source = Bench(model, page_size=page_size)
    source_table = source.pages(NUM_TOKENS)
    source.run(tokens, [30], table=source_table)
    bench = Bench(model, page_size=page_size)
    bench.pages(num_pages * page_size)  # so that the pages are others than in the source
    table = moved_prefix(bench, source, source_table, num_pages, spoil)
    start = num_pages * page_size
    return bench.run(tokens, [start + 1, NUM_PROMPT], start=start, table=table)


@pytest.mark.parametrize("page_size, num_pages", [(1, 77), (16, 1), (16, 8), (64, 1), (64, 2)])
def test_a_prefix_that_was_stored_and_loaded_is_as_good_as_computed(name: str, page_size: int, num_pages: int) -> None:
    assert_same(resumed(name, page_size, num_pages, intact), reference(name))


@pytest.mark.parametrize("spoil", [scaled, swapped, zeroed, one_bit_flipped])
def test_a_spoiled_prefix_shows_in_the_logits_and_in_the_bytes(name: str, spoil: Callable[[np.ndarray], None]) -> None:
    """Negative controls: without them an equality test could not fail."""
    run = resumed(name, 64, 2, spoil)
    with pytest.raises(AssertionError, match="logits differ after"):
        assert_same(run, reference(name))
    bytes_only = Run(reference(name).logits, run.kv)
    with pytest.raises(AssertionError, match="KV bytes differ at positions"):
        assert_same(bytes_only, reference(name))


# ---- types of KV, instructions, threads, and what is written


@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
def test_16_bit_kv_is_as_exact(name: str, dtype: torch.dtype) -> None:
    bench = Bench(model_named(name), page_size=16, dtype=dtype)
    assert_same(bench.run(tokens_of(name), [3, 64, *range(NUM_PROMPT, NUM_TOKENS)]), reference(name, dtype))
    with pytest.raises(AssertionError):
        assert_same(reference(name, DTYPES[1]), reference(name, DTYPES[2]))


@pytest.mark.parametrize("instructions", supported_instructions())
@pytest.mark.parametrize("threads", [1, 3])
def test_instruction_sets_and_threads_change_no_bit(instructions: str, threads: int) -> None:
    model = RowLlama(TINY, random_weights(TINY, 1), RowMath(threads, instructions))
    assert_same(Bench(model).run(tokens_of("random:1"), [31]), reference("random:1"))


def test_nothing_but_the_batch_s_own_slots_is_written(name: str) -> None:
    model, tokens = model_named(name), tokens_of(name)
    bench = Bench(model, page_size=16)
    table = bench.pages(64)
    bench.forward((tokens[:37], 0, table))
    own = np.concatenate([np.arange(page * 16, page * 16 + 16) for page in table])[:37]
    for side in (*bench.pool.k, *bench.pool.v):
        is_written = ~torch.isnan(side).flatten(1).any(1).numpy()
        assert np.array_equal(np.flatnonzero(is_written), np.sort(own))


def test_equality_tests_tell_zero_from_minus_zero_and_know_nan() -> None:
    assert same_bits(torch.tensor([torch.nan]), torch.tensor([torch.nan]))
    assert not same_bits(torch.tensor([0.0]), torch.tensor([-0.0]))
