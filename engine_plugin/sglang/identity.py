"""What the pages of an SGLang engine depend on: the namespace under which a host pool's pages are stored.

SGLang's page keys name tokens, adapter and salt, and nothing else; everything that decides the bytes of a page beside
them is here. The name a model is served under is not: two models may have the same.

    IdentityUnknown (ValueError)   see engine_plugin/models/checkpoint.py
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

from cachesvc.identity import encode_value
from engine_plugin.models.checkpoint import checkpoint_place, named_weights, without_volatile

VERSION = "cs1/sglang/1"
DECIDING_ARGUMENTS = ("dtype", "quantization", "quantization_param_path", "kv_cache_dtype", "json_model_override_args")


@dataclass(frozen=True, kw_only=True)
class PoolIdentity:
    """One host pool of one rank. `rank`: which shard of a page it holds, out of `rank_shape`; a replicated pool has
    one. `model` and `engine`: from `model_identity`, and SGLang's version."""

    model: str
    engine: str
    pool: str
    kind: str
    dtype: str
    geometry: tuple[tuple[str, int], ...]
    layout: str
    form: str
    format_tag: str
    page_size: int
    segment_bytes: tuple[int, ...]
    layers: tuple[int, int]
    is_replicated: bool
    rank_shape: tuple[tuple[str, int], ...]
    rank: tuple[int, ...]

    def namespace(self) -> str:
        """Different for pools whose pages are not interchangeable."""
        return f"sglang/{hashlib.sha256(VERSION.encode() + encode_value(astuple(self))).hexdigest()}"


def model_identity(args: Any, revision: str | None) -> str:
    """Names the weights and what is computed with them; those of a draft model too. `args`: SGLang's server arguments.
    `revision` stands for the weights. IdentityUnknown."""
    weights = [_weights(args.model_path, args.revision, args, revision)]
    draft = args.speculative_draft_model_path
    if draft is not None:
        weights.append(_weights(draft, args.speculative_draft_model_revision, args, revision))
    effective = {name: str(getattr(args, name)) for name in DECIDING_ARGUMENTS}
    effective["speculative_algorithm"] = str(args.speculative_algorithm)
    return hashlib.sha256(json.dumps([weights, effective], sort_keys=True).encode()).hexdigest()


def _weights(model: str, model_revision: str | None, args: Any, revision: str | None) -> list[str]:
    place = checkpoint_place(model, model_revision, args.download_dir)
    config = _config_digest(place)
    if revision is not None:
        return [f"revision {revision}", config or model]
    if str(args.load_format) == "dummy":
        return ["dummy", config or model]
    return [named_weights(model, place, "the extra config"), config]


def _config_digest(place: Path | None) -> str:
    """Of the model's configuration; empty where there is none to be read."""
    if place is None or not (place / "config.json").is_file():
        return ""
    fields = json.loads((place / "config.json").read_text(encoding="utf-8"))
    return hashlib.sha256(json.dumps(without_volatile(fields), sort_keys=True).encode()).hexdigest()
