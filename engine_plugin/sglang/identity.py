"""What the pages of an SGLang engine depend on: the namespace under which a host pool's pages are stored.

SGLang's page keys name tokens, adapter and salt, and nothing else; everything that decides the bytes of a page beside
them is here. The name a model is served under is not: two models may have the same.

    IdentityUnknown (ValueError)   nothing tells this engine's pages from those of another; says what would help
"""

from __future__ import annotations

import hashlib
import importlib
import json
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

from cachesvc.identity import encode_value
from engine_plugin.models.checkpoint import checkpoint_digest

VERSION = "cs1/sglang/1"
VOLATILE = ("_name_or_path", "name_or_path", "transformers_version")
"""Fields of config.json that say where a model came from, not what it computes."""
DECIDING_ARGUMENTS = ("dtype", "quantization", "quantization_param_path", "kv_cache_dtype", "json_model_override_args")


class IdentityUnknown(ValueError):
    """These pages cannot be named."""


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
    place = _place(model, model_revision, args.download_dir)
    config = _config_digest(place)
    if revision is not None:
        return [f"revision {revision}", config or model]
    if str(args.load_format) == "dummy":
        return ["dummy", config or model]
    digest = None if place is None else checkpoint_digest(place)
    if digest is None:
        raise IdentityUnknown(
            f"no weight files were found for {model}, so that nothing tells its pages from those of another model; "
            "name the weights with model_revision in the extra config"
        )
    return [digest.hex(), config]


def _config_digest(place: Path | None) -> str:
    """Of the model's configuration; empty where there is none to be read."""
    if place is None or not (place / "config.json").is_file():
        return ""
    fields = json.loads((place / "config.json").read_text(encoding="utf-8"))
    kept = {name: value for name, value in fields.items() if name not in VOLATILE}
    return hashlib.sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest()


def _place(model: str, revision: str | None, download_dir: str | None) -> Path | None:
    """Where the engine read the model from, if that is on this machine."""
    place = Path(model).expanduser()
    if place.exists():
        return place
    try:
        hub = importlib.import_module("huggingface_hub")
        return Path(hub.snapshot_download(model, revision=revision, cache_dir=download_dir, local_files_only=True))
    except Exception:  # whatever that library raises: there is nothing to read
        return None
