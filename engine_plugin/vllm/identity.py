"""What a vLLM engine's pages depend on, read from vLLM's own configuration; and what is not cached at all.

A page is shared only between engines that would compute the same bytes and lay them out alike: the namespace covers the
weights' content, the effective configuration of the model, the element type, the block size, the shape of the ranks,
vLLM's version, attention backend and instruction set, and the hash of vLLM's that names a block. What varies by
request is in that hash already (tokens, cache_salt, inputs of other modalities, an adapter's name), except for an
adapter's content, which is the request's scope.

    IdentityUnknown (ValueError)   these pages cannot be named; says what would help
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from cachesvc.config.model import ConfigError
from cachesvc.identity import DTYPE_BYTES, Identity
from engine_plugin.models.checkpoint import IdentityUnknown, checkpoint_place, named_weights, without_volatile
from engine_plugin.vllm.blocks import Rank, distinct_parts, frame_bytes
from engine_plugin.vllm.config import WHERE
from engine_plugin.vllm.metadata import WorkerShape

HASHES = ("sha256", "sha256_cbor")
"""vLLM's block hashes that nobody can make collide."""
KV_DTYPES = {"fp8": "float8_e4m3fn", "fp8_e4m3": "float8_e4m3fn", "fp8_e5m2": "float8_e5m2"}
LAYOUT_VERSION = 1
_CONTENT_HASH = re.compile(r"[0-9a-f]{64}")


def check_block_hash(vllm_config: Any) -> str:
    """The name of vLLM's block hash. ConfigError: one that can be made to collide."""
    name = str(vllm_config.cache_config.prefix_caching_hash_algo)
    if name not in HASHES:
        raise ConfigError(
            f"prefix_caching_hash_algo={name}: two prompts can be made to have one hash, and pages outlive the process "
            f"and are shared; use --prefix-caching-hash-algo {' or '.join(HASHES)}"
        )
    return name


def why_unsupported(vllm_config: Any, kv_cache_config: Any) -> str:
    """Why this engine's KV is not cached below the device; empty where it is."""
    parallel, cache = vllm_config.parallel_config, vllm_config.cache_config
    kinds = [type(group.kv_cache_spec).__name__ for group in kv_cache_config.kv_cache_groups]
    reasons = {
        "vLLM's own prefix caching is off": not cache.enable_prefix_caching,
        f"its KV cache has groups {', '.join(kinds) or 'none'}; supported is one group of full attention": (
            kinds not in (["FullAttentionSpec"], ["MLAAttentionSpec"])
        ),
        "encoder-decoder model": vllm_config.model_config.is_encoder_decoder,
        "context parallel ranks share out a block's tokens": (
            parallel.decode_context_parallel_size * parallel.prefill_context_parallel_size > 1
        ),
        "its ranks are on several machines": parallel.nnodes_within_dp > 1,
        "its draft model has KV of its own": _has_draft_kv(vllm_config.speculative_config),
        f"KV dtype {cache.cache_dtype}": _kv_dtype(vllm_config) not in DTYPE_BYTES,
    }
    return next((why for why, holds in reasons.items() if holds), "") or _why_not_causal(kv_cache_config)


def engine_identity(
    vllm_config: Any, kv_cache_config: Any, shapes: Mapping[Rank, WorkerShape], revision: str | None
) -> Identity:
    """The namespace of this engine's pages; its `page_bytes()` is a frame's size, all ranks side by side.

    `revision` names the weights instead of their content. IdentityUnknown, ConfigError.
    """
    block_hash = check_block_hash(vllm_config)
    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    block_size, dtype = int(vllm_config.cache_config.block_size), _kv_dtype(vllm_config)
    spec = kv_cache_config.kv_cache_groups[0].kv_cache_spec
    parts = distinct_parts(shapes)
    num_layers = sum(part.num_layers for part in parts if part.tp_rank == 0)
    num_heads = int(spec.num_kv_heads) * (len(parts) // parallel.pipeline_parallel_size)
    head_dim, rest = divmod(frame_bytes(shapes), 2 * num_layers * num_heads * block_size * DTYPE_BYTES[dtype])
    if rest or not head_dim:
        raise IdentityUnknown(f"a block of {frame_bytes(shapes)} bytes does not consist of keys and values alone")
    return Identity(
        model_id="+".join(model.hf_config.architectures or [model.hf_config.model_type]),
        weights_digest=weights_digest(vllm_config, revision),
        config_digest=config_digest(vllm_config),
        dtype=dtype,
        page_size=block_size,
        num_layers=num_layers,
        num_kv_heads=num_heads,
        head_dim=head_dim,
        kv_layout="vllm_blocks",
        kv_layout_version=LAYOUT_VERSION,
        rank_shape=(("pp", parallel.pipeline_parallel_size), ("tp", parallel.tensor_parallel_size)),
        engine_layout="|".join(dict.fromkeys(shape.layout for shape in shapes.values())),
        key_scheme=f"cs1/wrap/vllm/{block_hash}",
    )


def weights_digest(vllm_config: Any, revision: str | None) -> str:
    """What tells these weights from others. IdentityUnknown: there are no files, and no revision was given."""
    model, load = vllm_config.model_config, vllm_config.load_config
    if revision is not None:
        return f"revision {revision}"
    if str(getattr(load.load_format, "value", load.load_format)) == "dummy":
        import torch

        return f"dummy {model.seed} {torch.__version__}"
    place = checkpoint_place(model.model, model.revision, load.download_dir)
    return named_weights(model.model, place, WHERE)


def config_digest(vllm_config: Any) -> str:
    """What the model computes, apart from its weights: its configuration with every override, and the types."""
    model = vllm_config.model_config
    fields = without_volatile(model.hf_config.to_dict())
    effective = {
        "hf": fields,
        "dtype": str(model.dtype),
        "quantization": str(model.quantization),
        # some rotary scalings look at how long a prompt may become
        "max_model_len": model.max_model_len if _is_scaled(fields) else 0,
    }
    return hashlib.sha256(json.dumps(effective, sort_keys=True, default=str).encode()).hexdigest()


def layers_fingerprint(vllm_config: Any, layer_names: Sequence[str]) -> str:
    """In a worker: how the attention of these layers lays out a block, and in which order a page holds them."""
    from vllm import __version__

    layers = vllm_config.compilation_config.static_forward_context
    kinds = {
        f"{layers[name].get_attn_backend().get_name()}/{getattr(layers[name], 'isa', '')}/{layers[name].kv_cache_dtype}"
        for name in layer_names
    }
    names = hashlib.sha256("\n".join(layer_names).encode()).hexdigest()[:16]
    layout = vllm_config.cache_config.get_resolved_kv_cache_layout().name
    return f"vllm {__version__} {layout} {' '.join(sorted(kinds))} {names}"


def has_content_hashes(mm_features: Sequence[Any]) -> bool:
    """Whether every input of another modality goes by a digest of its content, and not by a name somebody gave it."""
    return all(_CONTENT_HASH.fullmatch(str(feature.identifier)) for feature in mm_features)


def _kv_dtype(vllm_config: Any) -> str:
    """The name in DTYPE_BYTES, or vLLM's own where there is none."""
    name = str(vllm_config.cache_config.cache_dtype)
    return str(vllm_config.model_config.dtype).removeprefix("torch.") if name == "auto" else KV_DTYPES.get(name, name)


def _has_draft_kv(speculative_config: Any) -> bool:
    return speculative_config is not None and str(speculative_config.method) not in ("ngram", "suffix")


def _why_not_causal(kv_cache_config: Any) -> str:
    spec = kv_cache_config.kv_cache_groups[0].kv_cache_spec
    return "a prefix's KV depends on what follows it" if spec.non_causal else ""


def _is_scaled(fields: Mapping[str, Any]) -> bool:
    rope = {**(fields.get("rope_scaling") or {}), **(fields.get("rope_parameters") or {})}
    return str(rope.get("rope_type", rope.get("type", "default"))) != "default"
