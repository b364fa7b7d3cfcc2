"""SGLang's arguments as they are in effect, not as they were typed: defaults resolved, and the model whose weights were
loaded last (`/update_weights_from_disk`)."""

from __future__ import annotations

from types import SimpleNamespace

from sglang.srt.runtime_context import get_exec, get_lora, get_model, get_observability, get_parallel, get_spec

from engine_plugin.models.checkpoint import FilesSeen
from engine_plugin.sglang.identity import model_identity

MODEL = (
    *("model_path", "revision", "download_dir", "load_format", "dtype", "quantization", "quantization_param_path"),
    *("kv_cache_dtype", "json_model_override_args", "modelopt_quant", "quantize_and_serve", "rl_quant_profile"),
)
SPECULATIVE = (
    *("speculative_algorithm", "speculative_draft_model_path", "speculative_draft_model_revision"),
    *("speculative_draft_model_quantization", "uno_lora_path"),
)
LORA = ("enable_lora", "lora_paths")
FILES_SEEN = FilesSeen()
"""Of this process, whose engine is attached to storage once, or several times."""


def identity_in_effect(revision: str | None) -> str:
    """Names this engine's model. IdentityUnknown."""
    return model_identity(_in_effect(), revision, FILES_SEEN)


def num_replicas() -> int:
    """Data-parallel ranks of this deployment, whole or of the attention alone (`--enable-dp-attention`): each has a
    scheduler and a cache, and counts its tensor, pipeline and context ranks by itself."""
    return int(get_parallel().num_dp_ranks)


def metric_labels(*, tp_rank: int, pp_rank: int, attn_cp_rank: int) -> dict[str, str]:
    """The labels of SGLang's own storage metrics that tell ranks apart, and the operator's. `dp_rank` is that of this
    process's scheduler: what a storage is told is 0 for every replica of `--dp-size` without attention of its own."""
    dp_rank = get_parallel().dp_rank or 0  # None: there is but one
    ranks = {"tp_rank": tp_rank, "dp_rank": dp_rank, "pp_rank": pp_rank, "attn_cp_rank": attn_cp_rank}
    labels = {**ranks, **(get_observability().extra_metric_labels or {})}
    return {name: str(value) for name, value in labels.items()}


def _in_effect() -> SimpleNamespace:
    """The arguments that `model_identity` looks at, by their names."""
    groups = (
        (get_model(), MODEL),
        (get_spec(), SPECULATIVE),
        (get_lora(), LORA),
        (get_exec().dllm, ("dllm_algorithm",)),
    )
    return SimpleNamespace(**{name: getattr(group, name) for group, names in groups for name in names})
