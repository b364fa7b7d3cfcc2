"""Llama over one whole sequence, without pages or chunks: what the engine's models are checked against."""

from __future__ import annotations

import torch

from engine_plugin.models.llama import LlamaConfig, LlamaWeights


def llama_oracle(
    config: LlamaConfig, weights: LlamaWeights, token_ids: list[int], dtype: torch.dtype = torch.float64
) -> tuple[torch.Tensor, list[tuple[torch.Tensor, torch.Tensor]]]:
    """Logits [n, vocab] of every token, and per layer the keys (rotated) and values [n, kv_heads, head_dim]."""
    n = len(token_ids)
    x = weights.embedding.to(dtype)[token_ids]
    kv = []
    for layer in weights.layers:
        h = _norm(x, layer.attention_norm.to(dtype), config.rms_norm_eps)
        projected = h @ layer.qkv.to(dtype).T
        q, k, v = projected.split([config.q_width, config.kv_width, config.kv_width], dim=-1)
        q = _rotary(q.view(n, config.num_heads, config.head_dim), config.rope_theta)
        k = _rotary(k.view(n, config.num_kv_heads, config.head_dim), config.rope_theta)
        v = v.view(n, config.num_kv_heads, config.head_dim)
        kv.append((k, v))
        x = x + _attention(q, k, v) @ layer.attention_output.to(dtype).T
        h = _norm(x, layer.mlp_norm.to(dtype), config.rms_norm_eps)
        gate, up = (h @ layer.gate_up.to(dtype).T).chunk(2, dim=-1)
        x = x + (gate / (1 + torch.exp(-gate)) * up) @ layer.down.to(dtype).T
    return _norm(x, weights.final_norm.to(dtype), config.rms_norm_eps) @ weights.head.to(dtype).T, kv


def _norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return x / torch.sqrt((x * x).mean(dim=-1, keepdim=True) + eps) * weight


def _rotary(x: torch.Tensor, theta: float) -> torch.Tensor:
    n, _, dim = x.shape
    frequency = theta ** (-torch.arange(0, dim, 2, dtype=torch.float64) / dim)
    angle = (torch.arange(n, dtype=torch.float64)[:, None] * frequency)[:, None, :].to(x.dtype)
    a, b = x[..., : dim // 2], x[..., dim // 2 :]
    return torch.cat((a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()), dim=-1)


def _attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    n, heads, dim = q.shape
    shared = heads // k.shape[1]
    future = torch.triu(torch.ones(n, n, dtype=torch.bool), diagonal=1)
    out = []
    for head in range(heads):
        scores = q[:, head] @ k[:, head // shared].T / dim**0.5
        out.append(scores.masked_fill(future, -torch.inf).softmax(dim=-1) @ v[:, head // shared])
    return torch.stack(out, dim=1).flatten(1)
