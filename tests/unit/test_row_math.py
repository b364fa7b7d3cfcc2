"""Row-invariant arithmetic: right against torch in float64, and equal in every bit however the work is cut."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from cachekernels.row_math import KvType, PoolLayer, RowBatch, RowMath, supported_instructions
from hypothesis import given, settings
from hypothesis import strategies as st

F32 = np.float32
SETS = supported_instructions()
TYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
MATH = {name: RowMath(2, name) for name in SETS}


def random(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape, F32)


def linear(math: RowMath, x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    out = np.full((len(x), len(weight)), np.nan, F32)
    math.linear(x, math.pack(weight), out, False)
    return out


# ---- products


@pytest.mark.parametrize("instructions", SETS)
@pytest.mark.parametrize("n, k", [(1, 1), (16, 7), (33, 192), (259, 193), (96, 577)])
def test_linear_is_the_product(instructions: str, n: int, k: int) -> None:
    x, weight = random(19, k), random(n, k, seed=1)
    exact = x.astype(np.float64) @ weight.astype(np.float64).T
    assert np.allclose(linear(MATH[instructions], x, weight), exact, rtol=0, atol=2e-6 * k**0.5 + 1e-5)


@given(st.data())
@settings(max_examples=40, deadline=None)
def test_a_row_of_a_product_does_not_depend_on_the_other_rows(data: st.DataObject) -> None:
    k, n = data.draw(st.integers(1, 400)), data.draw(st.integers(1, 70))
    rows = data.draw(st.integers(1, 130))
    x, weight = random(rows, k), random(n, k, seed=1)
    whole = linear(MATH[SETS[0]], x, weight)
    begin = data.draw(st.integers(0, rows - 1))
    end = data.draw(st.integers(begin + 1, rows))
    assert np.array_equal(linear(MATH[SETS[0]], x[begin:end].copy(), weight), whole[begin:end])


@pytest.mark.parametrize("instructions", SETS)
@pytest.mark.parametrize("threads", [1, 2, 5])
def test_instructions_and_threads_change_no_bit_of_a_product(instructions: str, threads: int) -> None:
    x, weight = random(101, 333), random(130, 333, seed=1)
    reference = linear(MATH["portable"], x, weight)
    assert np.array_equal(linear(RowMath(threads, instructions), x, weight), reference)


def test_accumulate_adds_the_finished_product() -> None:
    x, weight, base = random(9, 40), random(20, 40, seed=1), random(9, 20, seed=2)
    out = base.copy()
    MATH[SETS[0]].linear(x, MATH[SETS[0]].pack(weight), out, True)
    assert np.array_equal(out, base + linear(MATH[SETS[0]], x, weight))


def test_callers_on_several_threads_take_turns() -> None:
    math, weight = RowMath(3, "auto"), random(64, 100, seed=1)
    inputs = [random(rows, 100, seed=rows) for rows in (1, 5, 40, 7)]
    expected = [linear(math, x, weight) for x in inputs]
    with ThreadPoolExecutor(4) as threads:
        results = threads.map(
            lambda i: np.array_equal(linear(math, inputs[i % 4], weight), expected[i % 4]), range(400)
        )
        assert all(results)


def test_no_rows_is_no_work() -> None:
    assert linear(MATH[SETS[0]], random(0, 32), random(16, 32)).shape == (0, 16)


# ---- norms, gates, rotary


@pytest.mark.parametrize("instructions", SETS)
def test_rms_norm_and_silu(instructions: str) -> None:
    math, x, weight = MATH[instructions], random(37, 96) * 3, random(96, seed=1)
    normed = np.empty_like(x)
    math.rms_norm(x, weight, 1e-5, normed)
    wide = x.astype(np.float64)
    assert np.allclose(normed, wide / np.sqrt((wide**2).mean(-1, keepdims=True) + 1e-5) * weight, atol=1e-5)
    gated = np.empty((37, 48), F32)
    math.silu_and_multiply(x, gated)
    assert np.allclose(gated, wide[:, :48] / (1 + np.exp(-wide[:, :48])) * wide[:, 48:], atol=1e-5)
    for rows in (1, 5):
        part, gated_part = np.empty((rows, 96), F32), np.empty((rows, 48), F32)
        math.rms_norm(x[-rows:].copy(), weight, 1e-5, part)
        math.silu_and_multiply(x[-rows:].copy(), gated_part)
        assert np.array_equal(part, normed[-rows:]) and np.array_equal(gated_part, gated[-rows:])


@pytest.mark.parametrize("instructions", SETS)
def test_silu_far_out_is_its_limit_and_equal_everywhere(instructions: str) -> None:
    gate = np.array([[-1e4, -200, -88.1, -87.0, -30, -0.0, 0.0, 1e-20, 30, 87.5, 88.1, 1e30] + [1.5] * 4], F32)
    x = np.concatenate((gate, np.ones_like(gate)), axis=1)
    out, reference = np.empty_like(gate), np.empty_like(gate)
    MATH[instructions].silu_and_multiply(x, out)
    MATH["portable"].silu_and_multiply(x, reference)
    assert np.array_equal(out.view(np.uint32), reference.view(np.uint32))
    with np.errstate(over="ignore"):
        assert np.allclose(out, gate / (1 + np.exp(-gate.astype(np.float64))), rtol=1e-6, atol=1e-30)


class Layer:
    """One layer's pool of 4 heads of 32 over 2 KV heads, filled with NaN so that reading a foreign slot shows."""

    def __init__(self, num_pages: int, page_size: int, type_name: str = "float32") -> None:
        self.num_pages, self.page_size = num_pages, page_size
        self.k = torch.full((num_pages * page_size, 2, 32), torch.nan, dtype=TYPES[type_name])
        self.v = self.k.clone()
        kv_type = KvType[type_name]
        self.pool = PoolLayer(self.k.data_ptr(), self.v.data_ptr(), num_pages * page_size, 2, 32, kv_type)

    def batch(self, *runs: tuple[int, int, list[int]]) -> RowBatch:
        """Runs of (start, rows, page table)."""
        return RowBatch(
            np.cumsum([0] + [rows for _, rows, _ in runs]),
            np.array([start for start, _, _ in runs]),
            np.cumsum([0] + [len(table) for _, _, table in runs]),
            np.concatenate([table for _, _, table in runs]).astype(np.int32),
            self.page_size,
            self.num_pages,
        )

    def bytes(self) -> tuple[np.ndarray, np.ndarray]:
        return self.k.view(torch.uint8).numpy().copy(), self.v.view(torch.uint8).numpy().copy()


ANGLES = np.outer(np.arange(700), 0.9 ** np.arange(16))
COSINES, SINES = np.cos(ANGLES).astype(F32), np.sin(ANGLES).astype(F32)


def attend(math: RowMath, layer: Layer, batch: RowBatch, qkv: np.ndarray) -> np.ndarray:
    rotated = qkv.copy()
    math.rotary_and_store(rotated, batch, layer.pool, COSINES, SINES, 4)
    out = np.full((len(qkv), 128), np.nan, F32)
    math.attention(rotated, batch, layer.pool, 4, 0.2, out)
    return out


def attention_oracle(qkv: np.ndarray, kv_type: torch.dtype) -> torch.Tensor:
    heads = torch.from_numpy(qkv).double().view(len(qkv), 8, 32)
    cos, sin = (torch.from_numpy(table[: len(qkv)]).double()[:, None] for table in (COSINES, SINES))
    a, b = heads[:, :6, :16], heads[:, :6, 16:]
    turned = torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)
    k, v = turned[:, 4:].float().to(kv_type).double(), heads[:, 6:].float().to(kv_type).double()
    q, k, v = (x.transpose(0, 1)[None] for x in (turned[:, :4], k, v))
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.2, enable_gqa=True)
    return out[0].transpose(0, 1).flatten(1)


@pytest.mark.parametrize("instructions", SETS)
@pytest.mark.parametrize("type_name", TYPES)
def test_attention_is_softmax_over_the_past(instructions: str, type_name: str) -> None:
    qkv = random(150, 256)
    layer = Layer(40, 4, type_name)
    out = attend(MATH[instructions], layer, layer.batch((0, 150, list(range(39, 1, -1)))), qkv)
    assert np.allclose(out, attention_oracle(qkv, TYPES[type_name]), atol=3e-6)


def paged(layer: Layer, positions: int, order_seed: int) -> list[int]:
    """A shuffled page table for `positions` tokens."""
    pages = np.random.default_rng(order_seed).permutation(layer.num_pages)
    return pages[: -(-positions // layer.page_size)].tolist()


@pytest.mark.parametrize("type_name", TYPES)
@given(st.data())
@settings(max_examples=25, deadline=None)
def test_attention_does_not_depend_on_chunks_pages_or_company(type_name: str, data: st.DataObject) -> None:
    num_tokens = data.draw(st.integers(2, 200))
    qkv = random(num_tokens, 256)
    one = Layer(200, 1, type_name)
    whole = attend(MATH[SETS[0]], one, one.batch((0, num_tokens, list(range(num_tokens)))), qkv)
    other = Layer(230, data.draw(st.sampled_from([1, 3, 16, 64])), type_name)
    table = paged(other, num_tokens, order_seed=data.draw(st.integers(0, 9)))
    neighbour = [page for page in range(other.num_pages) if page not in table][:3]
    cuts = sorted(data.draw(st.sets(st.integers(1, num_tokens - 1), max_size=6)))
    for begin, end in zip([0, *cuts], [*cuts, num_tokens], strict=True):
        batch = other.batch((0, 2, neighbour), (begin, end - begin, table))
        company = np.concatenate((random(2, 256, seed=7), qkv[begin:end]))
        assert np.array_equal(attend(MATH[SETS[0]], other, batch, company)[2:], whole[begin:end])
    slots = other.batch((num_tokens - 1, 1, table)).context_slots(0)
    for mine, theirs in ((one.k, other.k), (one.v, other.v)):
        assert torch.equal(mine[:num_tokens].view(torch.uint8), theirs[slots].view(torch.uint8))


@pytest.mark.parametrize("instructions", SETS)
@pytest.mark.parametrize("type_name", TYPES)
def test_instructions_change_no_bit_of_attention_or_of_the_pool(instructions: str, type_name: str) -> None:
    qkv = random(140, 256) * 2
    results = []
    for math in (MATH["portable"], RowMath(3, instructions)):
        layer = Layer(9, 16, type_name)
        out = attend(math, layer, layer.batch((0, 140, list(range(9)))), qkv)
        results.append((out, *layer.bytes()))
    for mine, theirs in zip(*results, strict=True):
        assert np.array_equal(mine, theirs)


def test_only_the_batch_s_own_slots_are_written() -> None:
    layer = Layer(10, 8)
    before = layer.bytes()
    batch = layer.batch((5, 6, [7, 2]), (0, 3, [4]))
    attend_slots = batch.slots()
    qkv = random(9, 256)
    MATH[SETS[0]].rotary_and_store(qkv, batch, layer.pool, COSINES, SINES, 4)
    others = np.setdiff1d(np.arange(80), attend_slots)
    for old, new in zip(before, layer.bytes(), strict=True):
        assert np.array_equal(old[others], new[others])
        assert not np.array_equal(old[attend_slots], new[attend_slots])
    assert attend_slots.tolist() == [61, 62, 63, 16, 17, 18, 32, 33, 34]


@pytest.mark.parametrize("instructions", SETS)
@pytest.mark.parametrize("type_name", ["bfloat16", "float16"])
def test_rounding_to_16_bits_is_torch_s(instructions: str, type_name: str) -> None:
    dtype = TYPES[type_name]
    every = torch.arange(65536, dtype=torch.int32).to(torch.uint16).view(dtype).float()
    every = every[torch.isfinite(every)]
    between = (every[:-1] + every[1:]) / 2  # ties, and values on both sides of them
    values = torch.cat((every, between, between * (1 + 1e-7), torch.tensor([1e30, -1e30, 65519.9, 65520.0, 1e-30])))
    values = torch.nn.functional.pad(values[torch.isfinite(values)], (0, -len(values) % 64))
    values = values[: len(values) // 64 * 64].view(-1, 64)
    layer = Layer(len(values), 1, type_name)
    qkv = np.zeros((len(values), 256), F32)
    qkv[:, 192:] = values.numpy()  # the value heads: not rotated
    batch = layer.batch(*((0, 1, [page]) for page in range(len(values))))
    MATH[instructions].rotary_and_store(qkv, batch, layer.pool, COSINES, SINES, 4)
    assert torch.equal(layer.v.view(-1, 64).view(torch.uint16), values.to(dtype).view(torch.uint16))


# ---- the boundary


def test_wrong_arguments_say_what_was_expected() -> None:
    math = MATH[SETS[0]]
    packed = math.pack(random(16, 32))
    with pytest.raises(ValueError, match=r"x: expected shape \[n, 32\], got \[3, 31\]"):
        math.linear(random(3, 31), packed, np.empty((3, 16), F32), False)
    with pytest.raises(ValueError, match=r"out: expected shape \[3, 16\], got \[3, 15\]"):
        math.linear(random(3, 32), packed, np.empty((3, 15), F32), False)
    with pytest.raises(TypeError, match="x: expected dtype float32, got float64"):
        math.linear(random(3, 32).astype(np.float64), packed, np.empty((3, 16), F32), False)
    with pytest.raises(TypeError):
        math.linear(random(3, 32), packed, np.empty((3, 16)), False)
    with pytest.raises(ValueError, match="contiguous"):
        math.linear(random(32, 3).T, packed, np.empty((3, 16), F32), False)
    with pytest.raises(ValueError, match="width of x: expected a multiple of 16, got 20"):
        math.rms_norm(random(2, 20), random(20), 1e-5, np.empty((2, 20), F32))
    with pytest.raises(ValueError, match=r"expected auto or one of .*portable on this machine, got sse9"):
        RowMath(1, "sse9")
    with pytest.raises(ValueError, match="num_threads"):
        RowMath(0, "auto")


@pytest.mark.parametrize(
    "run, message",
    [
        ((0, 0, [1]), "sequence 0: no tokens"),
        ((-1, 2, [1]), "start -1 is negative"),
        ((6, 3, [1]), "its tokens end in page 2 of a table of 1"),
        ((0, 3, [10]), "page 10 is outside the pool of 10"),
        ((0, 3, [-1]), "page -1 is outside the pool of 10"),
    ],
)
def test_a_batch_that_would_leave_the_pool_is_refused(run: tuple[int, int, list[int]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Layer(10, 8).batch(run)


def test_a_batch_is_not_run_on_another_pool_or_beyond_the_rotary_table() -> None:
    batch = Layer(10, 8).batch((0, 1, [9]))
    with pytest.raises(ValueError, match="it has 16 slots, the batch was made for 80"):
        attend(MATH[SETS[0]], Layer(2, 8), batch, random(1, 256))
    layer = Layer(100, 8)
    with pytest.raises(ValueError, match="a token at position 700, the rotary table ends at 700"):
        attend(MATH[SETS[0]], layer, layer.batch((700, 1, list(range(100)))), random(1, 256))


def test_last_rows() -> None:
    layer = Layer(10, 8)
    batch = layer.batch((5, 6, [7, 2]), (0, 3, [4]))
    last = batch.last_rows([1, 0])
    assert last.positions().tolist() == [2, 10] and last.slots().tolist() == [34, 18]
    assert batch.last_row_numbers([1, 0]).tolist() == [8, 5]
    with pytest.raises(IndexError, match="sequence 2 is not in the batch"):
        batch.last_rows([2])
