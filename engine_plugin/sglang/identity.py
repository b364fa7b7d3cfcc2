"""What the pages of an SGLang engine depend on: the namespace under which a host pool's pages are stored.

SGLang's page keys name tokens, adapter and salt, and nothing else; everything that decides the bytes of a page beside
them is here. The name a model is served under is not: two models may have the same. An adapter that was given at the
launch is in a key by its name and path alone, so that its content is here; one that is loaded later has a random name.

    IdentityUnknown (ValueError)   see engine_plugin/models/checkpoint.py
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

from cachesvc.identity import encode_value
from engine_plugin.models.checkpoint import (
    FilesSeen,
    IdentityUnknown,
    adapter_digest,
    checkpoint_place,
    named_weights,
    without_volatile,
)

VERSION = "cs1/sglang/1"
DECIDING_ARGUMENTS = (
    *("dtype", "quantization", "kv_cache_dtype", "json_model_override_args"),
    *("modelopt_quant", "quantize_and_serve", "rl_quant_profile", "dllm_algorithm"),
    *("speculative_algorithm", "speculative_draft_model_quantization"),
)
WHERE_NAMED = "the extra config"
CHANGED = "the files at {place} have changed since this engine was named first: which of the two it has cannot be known"


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


def model_identity(args: Any, revision: str | None, seen: FilesSeen) -> str:
    """Names the weights, those of a draft model and of adapters too, and what is computed with them. `args`: SGLang's
    arguments (arguments.py). `revision` stands for the weights. `seen`: of the engine's process. IdentityUnknown."""
    weights = [_weights(args.model_path, args.revision, args, revision, seen)]
    draft = args.speculative_draft_model_path
    if draft is not None:
        weights.append(_weights(draft, args.speculative_draft_model_revision, args, revision, seen))
    effective = {name: str(getattr(args, name)) for name in DECIDING_ARGUMENTS}
    effective["kv scales"] = _file_digest(args.quantization_param_path)
    named = [weights, effective, _adapters(args, revision, seen)]
    return hashlib.sha256(json.dumps(named, sort_keys=True).encode()).hexdigest()


def _adapters(args: Any, revision: str | None, seen: FilesSeen) -> list[list[str]]:
    """Name, path and content of each adapter of the launch line. IdentityUnknown: one cannot be read, and no revision
    was given."""
    launched = [(str(one.lora_name), str(one.lora_path)) for one in args.lora_paths or () if args.enable_lora]
    if args.uno_lora_path is not None:
        launched.append(("", str(args.uno_lora_path)))
    named = []
    for name, path in sorted(launched):
        place = checkpoint_place(path, None, args.download_dir)
        if place is not None and seen.have_changed(place):
            raise IdentityUnknown(f"{CHANGED.format(place=place)}; start the engine anew")
        digest = None if place is None else adapter_digest(place)
        if digest is None and revision is None:
            raise IdentityUnknown(
                f"no adapter was found at {path}, so that nothing tells its pages from those of another one with this "
                f"name and path; name weights and adapters with model_revision in {WHERE_NAMED}"
            )
        named.append([name, path, f"revision {revision}" if digest is None else digest.hex()])
    return named


def _file_digest(path: str | None) -> str:
    """Of what is in a file; of its name where it cannot be read, and nothing for none."""
    if path is None:
        return ""
    try:
        return hashlib.sha256(Path(path).read_bytes()).hexdigest()
    except OSError:
        return f"unread {path}"


def _weights(model: str, model_revision: str | None, args: Any, revision: str | None, seen: FilesSeen) -> list[str]:
    place = checkpoint_place(model, model_revision, args.download_dir)
    config = _config_digest(place)
    if revision is not None:
        return [f"revision {revision}", config or model]
    if str(args.load_format) == "dummy":
        return ["dummy", config or model]
    if place is not None and seen.have_changed(place):
        raise IdentityUnknown(f"{CHANGED.format(place=place)}; name the weights with model_revision in {WHERE_NAMED}")
    return [named_weights(model, place, WHERE_NAMED), config]


def _config_digest(place: Path | None) -> str:
    """Of the model's configuration; empty where there is none to be read."""
    if place is None or not (place / "config.json").is_file():
        return ""
    fields = json.loads((place / "config.json").read_text(encoding="utf-8"))
    return hashlib.sha256(json.dumps(without_volatile(fields), sort_keys=True).encode()).hexdigest()
