"""engine.prefill, engine.decode: the model runner on SmolLM2-135M against a bare torch loop.

The bare loop is the same model with nothing around it: the same fused weights, dtype and threads, one contiguous KV
cache, F.linear and SDPA, no pages, no batch of unlike sequences, and no promise about bits. For scale: SGLang makes 390
and vLLM 460-620 prefill tokens/s of this model on a machine of this kind.

`rows.*` is the measurement the design rests on: how many of some row counts give the bits of a 512-row product, with
torch's linear as reference. It depends on the machine; where it is not 1, tokens would depend on the chunk.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 - torch's own name for it
from cachekernels.row_math import RowMath

from bench.harness import Measurement, Run, figure
from engine_plugin.engine.batch import ForwardBatch, Sequence
from engine_plugin.engine.loading import DEFAULT_MODEL, open_model
from engine_plugin.engine.runner import ModelRunner
from engine_plugin.hicache.base import OpenGate
from engine_plugin.memory.pools import KVPool
from engine_plugin.models.llama import LlamaConfig, LlamaWeights, rotary_tables
from engine_plugin.models.row_llama import RowLlama

PAGE_SIZE = 64
PREFILL_TOKENS, CHUNK_TOKENS = 1024, 512
DECODE_CONTEXT, DECODE_STEPS = 512, 16
ROW_COUNTS = (1, 2, 3, 4, 7, 8, 15, 16, 17, 64, 200)


class BareLoop:
    """The model over `batch` sequences of equal length in one contiguous cache."""

    def __init__(self, config: LlamaConfig, weights: LlamaWeights, batch: int, max_tokens: int) -> None:
        self.config, self.weights = config, weights
        self.cosines, self.sines = (torch.from_numpy(table) for table in rotary_tables(config))
        shape = (config.num_layers, batch, config.num_kv_heads, max_tokens, config.head_dim)
        self.k, self.v = torch.zeros(shape), torch.zeros(shape)

    @torch.inference_mode()
    def forward(self, token_ids: torch.Tensor, start: int) -> torch.Tensor:
        """token_ids int64 [batch, n] at positions from `start` on -> logits [batch, vocab] of the last ones."""
        eps, end = self.config.rms_norm_eps, start + token_ids.shape[1]
        x = F.embedding(token_ids, self.weights.embedding)
        for index, layer in enumerate(self.weights.layers):
            h = F.rms_norm(x, (self.config.hidden_size,), layer.attention_norm, eps)
            x = x + F.linear(self._attention(index, F.linear(h, layer.qkv), start, end), layer.attention_output)
            h = F.rms_norm(x, (self.config.hidden_size,), layer.mlp_norm, eps)
            gate, up = F.linear(h, layer.gate_up).chunk(2, dim=-1)
            x = x + F.linear(F.silu(gate) * up, layer.down)
        h = F.rms_norm(x[:, -1], (self.config.hidden_size,), self.weights.final_norm, eps)
        return F.linear(h, self.weights.head)

    def _attention(self, index: int, qkv: torch.Tensor, start: int, end: int) -> torch.Tensor:
        config = self.config
        heads = qkv.view(*qkv.shape[:2], -1, config.head_dim).transpose(1, 2)
        cos, sin = self.cosines[start:end], self.sines[start:end]
        a, b = heads[:, : config.num_heads + config.num_kv_heads].chunk(2, dim=-1)
        rotated = torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)
        self.k[index, :, :, start:end] = rotated[:, config.num_heads :]
        self.v[index, :, :, start:end] = heads[:, config.num_heads + config.num_kv_heads :]
        visible = None
        if start and end - start > 1:
            visible = torch.ones(end - start, end, dtype=torch.bool).tril(start)
        attended = F.scaled_dot_product_attention(
            rotated[:, : config.num_heads],
            self.k[index, :, :, :end],
            self.v[index, :, :, :end],
            attn_mask=visible,
            is_causal=start == 0 and end > 1,
            enable_gqa=True,
        )
        return attended.transpose(1, 2).flatten(2)


@dataclass(frozen=True)
class Contestants:
    """Both on the same weights. `tokens` int64 [n] is any text as far as the arithmetic is concerned."""

    config: LlamaConfig
    weights: LlamaWeights
    model: RowLlama
    tokens: torch.Tensor


@cache
def contestants() -> Contestants:
    source = open_model(DEFAULT_MODEL)
    weights = source.read_weights()
    model = RowLlama(source.config, weights, RowMath(torch.get_num_threads(), "auto"))
    tokens = np.random.default_rng(1).integers(0, source.config.vocab_size, 4096)
    return Contestants(source.config, weights, model, torch.from_numpy(tokens))


class Paged:
    """The runner over `batch` sequences of equal length, pages in no order."""

    def __init__(self, both: Contestants, batch: int, max_tokens: int) -> None:
        pages = -(-max_tokens // PAGE_SIZE)
        pool = KVPool(both.config.kv_shape(torch.float32), batch * pages, PAGE_SIZE)
        self.runner = ModelRunner(both.model, pool)
        self.tables = np.random.default_rng(2).permutation(batch * pages).astype(np.int32).reshape(batch, pages)

    def forward(self, token_ids: torch.Tensor, start: int) -> torch.Tensor:
        """As BareLoop.forward."""
        rows = token_ids.numpy().astype(np.uint32)
        runs = [Sequence(row, start, table) for row, table in zip(rows, self.tables, strict=True)]
        return self.runner.forward(ForwardBatch(runs, OpenGate()))


def prefill(side: Paged | BareLoop, tokens: torch.Tensor) -> None:
    for start in range(0, PREFILL_TOKENS, CHUNK_TOKENS):
        side.forward(tokens[None, start : start + CHUNK_TOKENS], start)


def decode(side: Paged | BareLoop, tokens: torch.Tensor) -> None:
    for step in range(DECODE_STEPS):
        side.forward(tokens[:, step : step + 1], DECODE_CONTEXT + step)


def note() -> str:
    return contestants().model.arithmetic


@figure("engine.prefill", unit="tokens/s", target="ratio>=0.9", reference="bare torch loop")
def engine_prefill(run: Run) -> Measurement:
    both = contestants()
    ours, bare = Paged(both, 1, PREFILL_TOKENS), BareLoop(both.config, both.weights, 1, PREFILL_TOKENS)
    return run.paired_rate(
        lambda: prefill(ours, both.tokens),
        lambda: prefill(bare, both.tokens),
        amount=PREFILL_TOKENS,
        note=f"{PREFILL_TOKENS} tokens in chunks of {CHUNK_TOKENS}; {note()}",
    )


def decode_rate(run: Run, batch: int) -> Measurement:
    both = contestants()
    max_tokens = DECODE_CONTEXT + DECODE_STEPS
    ours, bare = Paged(both, batch, max_tokens), BareLoop(both.config, both.weights, batch, max_tokens)
    context = both.tokens[:DECODE_CONTEXT].expand(batch, -1)
    steps = both.tokens[: batch * DECODE_STEPS].view(batch, DECODE_STEPS)
    for side in (ours, bare):
        side.forward(context, 0)
    return run.paired_rate(
        lambda: decode(ours, steps),
        lambda: decode(bare, steps),
        amount=batch * DECODE_STEPS,
        note=f"after {DECODE_CONTEXT} tokens; {note()}",
    )


@figure("engine.decode", unit="tokens/s", target="ratio>=0.9", reference="bare torch loop")
def engine_decode(run: Run) -> Measurement:
    return decode_rate(run, 1)


@figure("engine.decode_batch_16", unit="tokens/s", target="ratio>=0.9", reference="bare torch loop")
def engine_decode_batch(run: Run) -> Measurement:
    return decode_rate(run, 16)


def equal_share(product: object, width: int) -> float:
    """Of ROW_COUNTS, the share for which `product(x[:m])` has the bits of the first rows of `product(x)`."""
    assert callable(product)
    x = torch.randn(512, width, generator=torch.Generator().manual_seed(0))
    whole = product(x)
    equal = [torch.equal(product(x[:rows].contiguous()), whole[:rows]) for rows in ROW_COUNTS]
    return sum(equal) / len(equal)


@figure("rows.equal_to_512", unit="share", target="value>=1", reference="torch linear, float32")
def equal_rows(run: Run) -> Measurement:
    math = RowMath(torch.get_num_threads(), "auto")
    shares, torch_shares = [], []
    for n, k in ((960, 576), (576, 576), (3072, 576), (576, 1536)):
        weight = torch.randn(n, k, generator=torch.Generator().manual_seed(1)) / k**0.5
        packed = math.pack(weight.numpy())

        def ours(x: torch.Tensor, packed: object = packed, n: int = n) -> torch.Tensor:
            out = np.empty((len(x), n), np.float32)
            math.linear(x.numpy(), packed, out, False)  # type: ignore[arg-type]
            return torch.from_numpy(out)

        def theirs(x: torch.Tensor, weight: torch.Tensor = weight) -> torch.Tensor:
            return F.linear(x, weight)

        shares.append(equal_share(ours, k))
        torch_shares.append(equal_share(theirs, k))
    return run.of([min(shares)], [min(torch_shares)], note=f"rows {', '.join(map(str, ROW_COUNTS))}")
