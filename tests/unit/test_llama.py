"""The models against a plain oracle in float64, and what the runner refuses."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from cachekernels.row_math import RowMath

from engine_plugin.engine.batch import ForwardBatch, Sequence
from engine_plugin.engine.difference import first_difference
from engine_plugin.hicache.base import LayerGate, LoadFailed, OpenGate
from engine_plugin.memory.pools import KVPool
from engine_plugin.models.llama import Llama
from engine_plugin.models.random_llama import TINY, random_weights
from engine_plugin.models.row_llama import RowLlama, unsupported
from engine_plugin.models.torch_llama import TorchLlama
from tests.helpers.forwards import Bench, same_bits
from tests.oracles.llama import llama_oracle

WEIGHTS = random_weights(TINY, 1)
ROW = RowLlama(TINY, WEIGHTS, RowMath(2, "auto"))
MODELS: dict[str, Llama] = {"row": ROW, "torch": TorchLlama(TINY, WEIGHTS, torch.float32)}
TOKENS = np.random.default_rng(0).integers(0, TINY.vocab_size, 100).astype(np.uint32)


@pytest.mark.parametrize("model", MODELS.values(), ids=list(MODELS))
@pytest.mark.parametrize("cuts", [[], [37], [1, 2, 99]], ids=str)
def test_logits_and_kv_are_the_oracle_s(model: Llama, cuts: list[int]) -> None:
    bench = Bench(model)
    run = bench.run(TOKENS, cuts)
    logits, kv = llama_oracle(TINY, WEIGHTS, TOKENS.tolist())
    for end, got in run.logits.items():
        assert torch.allclose(got.double(), logits[end - 1], atol=2e-4)
    got_kv = torch.from_numpy(run.kv).view(torch.float32).unflatten(-1, (TINY.num_kv_heads, TINY.head_dim))
    for layer, (k, v) in enumerate(kv):
        assert torch.allclose(got_kv[layer, 0].double(), k, atol=1e-4)
        assert torch.allclose(got_kv[layer, 1].double(), v, atol=1e-4)


def test_bfloat16_compute_is_near_the_oracle() -> None:
    model = TorchLlama(TINY, WEIGHTS, torch.bfloat16)
    assert not model.is_row_invariant
    logits, _ = llama_oracle(TINY, WEIGHTS, TOKENS.tolist())
    got = Bench(model, dtype=torch.bfloat16).run(TOKENS).logits[100]
    assert got.dtype == torch.float32
    assert torch.nn.functional.cosine_similarity(got.double(), logits[-1], dim=0) > 0.995


@pytest.mark.parametrize("model", MODELS.values(), ids=list(MODELS))
def test_a_batch_gives_the_logits_asked_for_in_that_order(model: Llama) -> None:
    bench = Bench(model)
    tables = [bench.pages(40) for _ in range(3)]
    runs = [(TOKENS[i : i + 20 + i], 0, tables[i]) for i in range(3)]
    every = bench.forward(*runs)
    assert every.shape == (3, TINY.vocab_size) and every.dtype == torch.float32
    again = Bench(model)
    batch = ForwardBatch([Sequence(*run) for run in runs], OpenGate())
    assert torch.allclose(again.runner.forward(batch, [2, 0]), every[[2, 0]], atol=1e-5)
    assert again.runner.forward(batch, []).shape == (0, TINY.vocab_size)
    assert np.array_equal(again.kv(tables[1], 21), bench.kv(tables[1], 21))


class FailingGate(LayerGate):
    """Whatever layer 1 waits for does not come."""

    def wait(self, layer: int) -> None:
        if layer == 1:
            raise LoadFailed([], [])


@pytest.mark.parametrize("model", MODELS.values(), ids=list(MODELS))
def test_the_gate_is_asked_once_for_each_layer_before_its_kv_is_read(model: Llama) -> None:
    """A prefix that arrives only while the gate waits is used all the same."""
    source = Bench(model)
    table = source.pages(100)
    expected = source.run(TOKENS, [64], table=table)
    bench = Bench(model)

    class LoadingGate(LayerGate):
        def __init__(self) -> None:
            self.layers: list[int] = []

        def wait(self, layer: int) -> None:
            self.layers.append(layer)
            slots = torch.from_numpy((table[:4, None] * 16 + np.arange(16)).ravel().astype(np.int64))
            bench.pool.k[layer][slots] = source.pool.k[layer][slots]
            bench.pool.v[layer][slots] = source.pool.v[layer][slots]

    gate = LoadingGate()
    logits = bench.forward((TOKENS[64:], 64, table), gate=gate)
    assert gate.layers == [0, 1, 2]
    assert same_bits(logits[0], expected.logits[100])


@pytest.mark.parametrize("model", MODELS.values(), ids=list(MODELS))
def test_a_failed_load_passes_through_and_the_model_runs_on(model: Llama) -> None:
    bench = Bench(model)
    table = bench.pages(100)
    with pytest.raises(LoadFailed):
        bench.forward((TOKENS, 0, table), gate=FailingGate())
    fresh = Bench(model).run(TOKENS)
    assert same_bits(bench.run(TOKENS, table=table).logits[100], fresh.logits[100])


@pytest.mark.parametrize(
    "run, message",
    [
        ((np.array([TINY.vocab_size], np.uint32), 0, np.array([0], np.int32)), "token id 259: the vocabulary has 259"),
        (
            (TOKENS[:1], TINY.context_length, np.arange(200, dtype=np.int32)),
            "ends at position 2049, beyond the context",
        ),
        ((TOKENS[:17], 0, np.array([0], np.int32)), "its tokens end in page 2 of a table of 1"),
        ((TOKENS[:1], 0, np.array([32], np.int32)), "page 32 is outside the pool of 32"),
        ((TOKENS[:0], 0, np.array([0], np.int32)), "sequence 1: no tokens"),
    ],
)
def test_what_cannot_be_computed_is_refused_before_anything_is_written(
    run: tuple[np.ndarray, int, np.ndarray], message: str
) -> None:
    bench = Bench(ROW)
    with pytest.raises(ValueError, match=message):
        bench.forward((TOKENS[:5], 0, np.array([3], np.int32)), run)
    assert all(bool(torch.isnan(side).all()) for side in bench.pool.k)


@pytest.mark.parametrize("model", MODELS.values(), ids=list(MODELS))
def test_a_pool_of_another_shape_is_refused(model: Llama) -> None:
    with pytest.raises(ValueError, match="the model needs"):
        model.attach(KVPool(replace(TINY, num_layers=2).kv_shape(torch.float32), 4, 16))


@pytest.mark.parametrize(
    "change, message",
    [
        ({"head_dim": 48}, "head dim 48 is no multiple of 32"),
        ({"hidden_size": 72}, "hidden size 72 is no multiple of 16"),
    ],
)
def test_shapes_the_row_arithmetic_cannot_take_are_named(change: dict[str, int], message: str) -> None:
    assert unsupported(TINY) is None
    config = replace(TINY, **change)
    assert unsupported(config) == message
    with pytest.raises(ValueError, match=message):
        RowLlama(config, random_weights(config, 0), RowMath(1, "auto"))
    assert TorchLlama(config, random_weights(config, 0), torch.float32).config == config


def test_random_weights_are_named_by_their_digest() -> None:
    assert random_weights(TINY, 1).digest == WEIGHTS.digest != random_weights(TINY, 2).digest
    assert random_weights(replace(TINY, rope_theta=1e5), 1).digest != WEIGHTS.digest


def test_the_first_difference_is_shown_with_its_gap() -> None:
    logits = torch.tensor([1.0, 3.0, 2.75, -1.0])
    assert first_difference([1, 2], [1, 2], lambda _: logits, lambda _: logits) is None
    text = str(first_difference([1, 2, 1], [1, 2], lambda _: logits, lambda _: -logits))
    assert text == (
        "output token 2 differs: expected 1 from top-2 [1, 2] with logits 3.000000 and 2.750000 (gap 0.25), "
        "got -1 from top-2 [3, 0] with logits 1.000000 and -1.000000 (gap 2)"
    )
