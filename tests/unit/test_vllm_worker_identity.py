"""What a vLLM engine's pages are named after, and which tensors can be copied. vLLM's own objects are stood in for by
plain ones with the fields that are read."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from cachesvc.config.model import ConfigError
from engine_plugin.models.checkpoint import AdapterDigests, IdentityUnknown, checkpoint_digest
from engine_plugin.vllm.blocks import BlocksUnusable, find_blocks, frame_bytes, frame_offsets
from engine_plugin.vllm.identity import (
    check_block_hash,
    engine_identity,
    has_content_hashes,
    why_unsupported,
)
from engine_plugin.vllm.metadata import WorkerShape

BLOCK, HEADS, HEAD_DIM, LAYERS = 64, 2, 32, 4
LAYER_BYTES = BLOCK * HEADS * 2 * HEAD_DIM * 2


class FullAttentionSpec(SimpleNamespace):
    """As vLLM's, which goes by its name."""


class SlidingWindowSpec(SimpleNamespace):
    """As vLLM's."""


def engine(model: Path | str = "random", **load: Any) -> Any:
    """A vLLM configuration."""
    fields = {"hidden_size": 64, "_name_or_path": str(model), "rope_parameters": {"rope_type": "default"}}
    return SimpleNamespace(
        model_config=SimpleNamespace(
            model=str(model),
            revision=None,
            seed=0,
            dtype=torch.bfloat16,
            quantization=None,
            max_model_len=4096,
            is_encoder_decoder=False,
            hf_config=SimpleNamespace(
                architectures=["Qwen3ForCausalLM"], to_dict=lambda: deepcopy(fields), fields=fields
            ),
        ),
        cache_config=SimpleNamespace(
            block_size=BLOCK,
            cache_dtype="auto",
            prefix_caching_hash_algo="sha256",
            enable_prefix_caching=True,
        ),
        parallel_config=SimpleNamespace(
            tensor_parallel_size=1,
            pipeline_parallel_size=1,
            decode_context_parallel_size=1,
            prefill_context_parallel_size=1,
            nnodes=1,
            nnodes_within_dp=1,
            data_parallel_size=1,
            data_parallel_rank=0,
            data_parallel_index=0,
        ),
        load_config=SimpleNamespace(load_format="auto", download_dir=None, **load),
        speculative_config=None,
    )


def kv_cache(*specs: Any) -> Any:
    groups = [SimpleNamespace(kv_cache_spec=spec) for spec in specs or (attention(),)]
    return SimpleNamespace(kv_cache_groups=groups)


def attention(**changes: Any) -> FullAttentionSpec:
    return FullAttentionSpec(**{"num_kv_heads": HEADS, "non_causal": False} | changes)


def shapes(tp: int = 1, pp: int = 1, replicas: int = 1, layout: str = "v1") -> dict[tuple[int, int], WorkerShape]:
    return {
        (p, t): WorkerShape(p, t, LAYERS // pp, LAYER_BYTES, layout, replicas) for p in range(pp) for t in range(tp)
    }


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A checkpoint of two files."""
    folder = tmp_path / "model"
    folder.mkdir()
    generator = torch.Generator().manual_seed(1)
    for index in range(2):
        tensors = {f"w{index}.{part}": torch.randn(100, 100, generator=generator) for part in "ab"}
        save_file(tensors, folder / f"model-{index}.safetensors")
    return folder


class TestIdentity:
    """One engine, and others that differ in one thing."""

    def test_a_page_is_a_frame_with_all_ranks(self, model: Path) -> None:
        config = engine(model)
        config.parallel_config.tensor_parallel_size, config.parallel_config.pipeline_parallel_size = 2, 2
        ranks = shapes(tp=2, pp=2)
        identity = engine_identity(config, kv_cache(), ranks, None)
        assert identity.page_bytes() == frame_bytes(ranks) == 2 * LAYERS * LAYER_BYTES
        assert (identity.num_layers, identity.num_kv_heads, identity.head_dim) == (LAYERS, 2 * HEADS, HEAD_DIM)
        assert identity.rank_shape == (("pp", 2), ("tp", 2))

    def test_ranks_that_hold_the_same_bytes_count_once(self, model: Path) -> None:
        config = engine(model)
        config.parallel_config.tensor_parallel_size = 4
        ranks = shapes(tp=4, replicas=2)
        assert engine_identity(config, kv_cache(), ranks, None).page_bytes() == 2 * LAYERS * LAYER_BYTES
        part = LAYERS * LAYER_BYTES
        assert frame_offsets(ranks) == {(0, 0): 0, (0, 1): 0, (0, 2): part, (0, 3): part}

    def test_the_same_engine_started_twice_and_moved_elsewhere_has_one_namespace(self, model: Path) -> None:
        first = engine_identity(engine(model), kv_cache(), shapes(), None)
        moved = model.rename(model.with_name("other-place"))
        assert engine_identity(engine(moved), kv_cache(), shapes(), None).namespace() == first.namespace()

    @pytest.mark.parametrize(
        "change",
        [
            lambda config: setattr(config.model_config, "dtype", torch.float16),
            lambda config: setattr(config.model_config, "quantization", "fp8"),
            lambda config: config.model_config.hf_config.fields.update(rope_theta=5.0),
            lambda config: setattr(config.cache_config, "prefix_caching_hash_algo", "sha256_cbor"),
            lambda config: setattr(config.parallel_config, "tensor_parallel_size", 2),
            lambda config: config.model_config.hf_config.architectures.append("Other"),
        ],
    )
    def test_whatever_changes_what_is_computed_or_how_it_is_named_changes_the_namespace(
        self, change: Callable[[Any], None], model: Path
    ) -> None:
        config = engine(model)
        before = engine_identity(config, kv_cache(), shapes(), None).namespace()
        change(config)
        assert engine_identity(config, kv_cache(), shapes(), None).namespace() != before

    def test_so_does_another_layout_or_instruction_set(self, model: Path) -> None:
        one, other = (engine_identity(engine(model), kv_cache(), shapes(layout=name), None) for name in ("amx", "vec"))
        assert one.namespace() != other.namespace()

    def test_the_longest_prompt_counts_only_where_rotary_scaling_may_look_at_it(self, model: Path) -> None:
        for kind, is_equal in (("default", True), ("longrope", False)):
            found = []
            for longest in (4096, 8192):
                config = engine(model)
                config.model_config.hf_config.fields["rope_parameters"]["rope_type"] = kind
                config.model_config.max_model_len = longest
                found.append(engine_identity(config, kv_cache(), shapes(), None).namespace())
            assert (found[0] == found[1]) == is_equal

    @pytest.mark.parametrize("has_experts", [False, True])
    def test_data_parallel_ranks_have_one_namespace(self, model: Path, has_experts: bool) -> None:
        """With what vLLM's engine processes are told: a model without experts is served by independent engines, which
        go by their index alone."""
        alone = engine_identity(engine(model), kv_cache(), shapes(), None)
        for rank in range(2):
            config = engine(model)
            config.parallel_config.data_parallel_index = rank
            config.kv_transfer_config = SimpleNamespace(engine_id=f"e_dp{rank}")
            config.instance_id = f"i_dp{rank}"
            if has_experts:
                config.parallel_config.data_parallel_size, config.parallel_config.data_parallel_rank = 2, rank
            assert engine_identity(config, kv_cache(), shapes(), None).namespace() == alone.namespace()

    def test_other_weights_in_the_same_place_have_another_namespace(self, model: Path) -> None:
        before = engine_identity(engine(model), kv_cache(), shapes(), None).namespace()
        tensor = torch.zeros(100, 100)
        tensor[-1, -1] = 1.0  # as small a training as can be seen
        save_file({"w1.a": tensor, "w1.b": torch.zeros(100, 100)}, model / "model-1.safetensors")
        assert engine_identity(engine(model), kv_cache(), shapes(), None).namespace() != before

    def test_a_revision_stands_for_the_content(self, model: Path) -> None:
        given = engine_identity(engine("nowhere"), kv_cache(), shapes(), "r1")
        assert given.weights_digest == "revision r1"
        assert engine_identity(engine(model), kv_cache(), shapes(), "r1").namespace() == given.namespace()

    def test_dummy_weights_are_named_by_their_seed(self) -> None:
        config = engine("nowhere")
        config.load_config.load_format = "dummy"
        first = engine_identity(config, kv_cache(), shapes(), None)
        config.model_config.seed = 1
        assert engine_identity(config, kv_cache(), shapes(), None).namespace() != first.namespace()

    def test_weights_without_a_name_are_refused(self) -> None:
        with pytest.raises(IdentityUnknown, match="name the weights with model_revision"):
            engine_identity(engine("nobody/has-this"), kv_cache(), shapes(), None)

    def test_blocks_that_hold_something_else_too_are_refused(self, model: Path) -> None:
        ranks = {(0, 0): WorkerShape(0, 0, LAYERS, LAYER_BYTES + 2, "v1")}
        with pytest.raises(IdentityUnknown, match="does not consist of keys and values alone"):
            engine_identity(engine(model), kv_cache(), ranks, None)

    @pytest.mark.parametrize("name", ["xxhash", "xxhash_cbor"])
    def test_hashes_that_can_be_made_to_collide_are_refused(self, name: str) -> None:
        config = engine()
        config.cache_config.prefix_caching_hash_algo = name
        with pytest.raises(ConfigError, match="use --prefix-caching-hash-algo sha256"):
            check_block_hash(config)

    def test_an_input_by_a_name_somebody_gave_it_has_no_content_hash(self) -> None:
        def feature(name: str) -> Any:
            return SimpleNamespace(identifier=name)

        assert has_content_hashes([feature("a" * 64)])
        assert not has_content_hashes([feature("a" * 64), feature("image-1")])


class TestUnsupported:
    """Engines whose KV is not kept below the device."""

    def test_full_attention_in_one_group_is(self) -> None:
        assert not why_unsupported(engine(), kv_cache())

    @pytest.mark.parametrize(
        ("cache", "why"),
        [
            (kv_cache(attention(), attention()), "groups FullAttentionSpec, FullAttentionSpec"),
            (kv_cache(SlidingWindowSpec()), "groups SlidingWindowSpec"),
            (SimpleNamespace(kv_cache_groups=[]), "groups none"),
            (kv_cache(attention(non_causal=True)), "depends on what follows"),
        ],
    )
    def test_other_groups_are_not(self, cache: Any, why: str) -> None:
        assert why in why_unsupported(engine(), cache)

    @pytest.mark.parametrize(
        ("part", "field", "value", "why"),
        [
            ("cache_config", "enable_prefix_caching", False, "prefix caching is off"),
            ("cache_config", "cache_dtype", "int4_per_token", "KV dtype int4_per_token"),
            ("model_config", "is_encoder_decoder", True, "encoder-decoder"),
            ("parallel_config", "decode_context_parallel_size", 2, "context parallel"),
            ("parallel_config", "prefill_context_parallel_size", 2, "context parallel"),
            ("parallel_config", "nnodes_within_dp", 2, "several machines"),
        ],
    )
    def test_other_engines_are_not(self, part: str, field: str, value: object, why: str) -> None:
        config = engine()
        setattr(getattr(config, part), field, value)
        assert why in why_unsupported(config, kv_cache())

    def test_an_engine_of_several_machines_is_where_each_replica_is_on_one(self) -> None:
        """As vLLM counts with `--nnodes 2 --data-parallel-size 2` for a model with experts."""
        config = engine()
        config.parallel_config.nnodes, config.parallel_config.data_parallel_size = 2, 2
        assert not why_unsupported(config, kv_cache())

    def test_a_draft_model_is_not_and_drafts_from_the_prompt_are(self) -> None:
        config = engine()
        config.speculative_config = SimpleNamespace(method="eagle")
        assert "draft model" in why_unsupported(config, kv_cache())
        config.speculative_config.method = "ngram"
        assert not why_unsupported(config, kv_cache())


class TestCheckpoint:
    """Names for files."""

    def test_every_tensor_and_its_name_counts(self, model: Path) -> None:
        before = checkpoint_digest(model)
        tensors = {"w0.a": torch.zeros(3), "w0.b": torch.zeros(3)}
        save_file(tensors, model / "model-0.safetensors")
        other = checkpoint_digest(model)
        save_file({"w0.a": torch.zeros(3), "w0.c": torch.zeros(3)}, model / "model-0.safetensors")
        assert len({before, other, checkpoint_digest(model)}) == 3

    def test_a_file_whose_tensors_are_not_told_apart_is_sampled_throughout(self, tmp_path: Path) -> None:
        content = np.zeros(5 << 20, np.uint8)
        (tmp_path / "pytorch_model.bin").write_bytes(content.tobytes())
        before = checkpoint_digest(tmp_path)
        content[4 << 20] = 1
        (tmp_path / "pytorch_model.bin").write_bytes(content.tobytes())
        assert before is not None and checkpoint_digest(tmp_path) != before

    def test_one_file_can_be_the_model(self, tmp_path: Path) -> None:
        (tmp_path / "x.gguf").write_bytes(b"GGUF" * 100)
        assert checkpoint_digest(tmp_path / "x.gguf") == checkpoint_digest(tmp_path)

    @pytest.mark.parametrize("content", [b"", b"\xff" * 64, b"\x08\0\0\0\0\0\0\0notjson!", b"\x64\0\0\0\0\0\0\0{}"])
    def test_what_is_not_there_or_not_whole_has_no_name(self, content: bytes, tmp_path: Path) -> None:
        assert checkpoint_digest(tmp_path) is None
        assert checkpoint_digest(tmp_path / "nowhere") is None
        if content:
            (tmp_path / "model.safetensors").write_bytes(content)
            assert checkpoint_digest(tmp_path) is None


class TestAdapters:
    """A request's adapter by its content."""

    def adapter(self, folder: Path, value: float) -> Path:
        folder.mkdir(exist_ok=True)
        (folder / "adapter_config.json").write_text(json.dumps({"r": 8}))
        save_file({"a": torch.full((64, 64), value)}, folder / "adapter_model.safetensors")
        return folder

    def test_the_same_content_has_the_same_name_wherever_it_lies(self, tmp_path: Path) -> None:
        one, other = self.adapter(tmp_path / "one", 1.0), self.adapter(tmp_path / "other", 1.0)
        digests = AdapterDigests()
        assert digests.of(str(one), 1) == digests.of(str(other), 2) is not None
        different = self.adapter(tmp_path / "different", 2.0)
        assert digests.of(str(different), 3) != digests.of(str(one), 1)

    def test_its_settings_count_too(self, tmp_path: Path) -> None:
        one, other = self.adapter(tmp_path / "one", 1.0), self.adapter(tmp_path / "other", 1.0)
        (other / "adapter_config.json").write_text(json.dumps({"r": 16}))
        assert AdapterDigests().of(str(one), 1) != AdapterDigests().of(str(other), 1)

    def test_one_whose_files_changed_has_no_name_until_the_engine_loads_it_anew(self, tmp_path: Path) -> None:
        folder, digests = self.adapter(tmp_path / "one", 1.0), AdapterDigests()
        assert digests.of(str(folder), 1) is not None
        self.adapter(folder, 2.0)
        assert digests.of(str(folder), 1) is None
        self.adapter(folder, 1.0)
        assert digests.of(str(folder), 1) is None
        assert digests.of(str(folder), 2) is not None

    def test_nor_has_one_that_was_written_to_and_given_its_old_times(self, tmp_path: Path) -> None:
        """As a copy does that keeps times. Adapters of one kind have one size."""
        folder, digests = self.adapter(tmp_path / "one", 1.0), AdapterDigests()
        assert digests.of(str(folder), 1) is not None
        file = folder / "adapter_model.safetensors"
        times, content = file.stat(), bytearray(file.read_bytes())
        content[-1] ^= 1
        with file.open("r+b") as opened:
            opened.write(content)
        os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))
        assert (file.stat().st_size, file.stat().st_mtime_ns) == (times.st_size, times.st_mtime_ns)
        assert digests.of(str(folder), 1) is None

    def test_what_is_no_folder_of_an_adapter_has_no_name(self, tmp_path: Path) -> None:
        assert AdapterDigests().of("somebody/adapter", 1) is None
        (tmp_path / "adapter_config.json").write_text("{}")
        assert AdapterDigests().of(str(tmp_path), 1) is None


def _overlapping(shape: tuple[int, ...]) -> dict[str, torch.Tensor]:
    memory = torch.zeros((7, *shape[1:]))
    return {"a": memory[:6], "b": memory[1:]}


class TestBlocks:
    """Which tensors of an engine can be copied."""

    shape = (6, HEADS, BLOCK, 2 * HEAD_DIM)

    def test_layers_keep_their_order_and_shared_ones_count_once(self) -> None:
        tensors = {name: torch.zeros(self.shape) for name in "cab"}
        blocks = find_blocks({**tensors, "shared": tensors["a"]}, 6, "LBHNC")
        assert blocks.layer_names == ("c", "a", "b")
        assert blocks.layout.bases.tolist() == [tensors[name].data_ptr() for name in "cab"]
        assert blocks.layout.chunk_bytes == HEADS * BLOCK * 2 * HEAD_DIM * 4

    def test_layers_in_one_allocation_and_blocks_that_the_kernel_cuts_up(self) -> None:
        memory = torch.zeros((3, 12, HEADS, BLOCK // 2, 2 * HEAD_DIM))
        blocks = find_blocks({f"l{index}": memory[index] for index in range(3)}, 6, "LBHNC")
        assert blocks.layout.chunk_bytes == memory[0].nbytes // 6

    @pytest.mark.parametrize(
        ("make", "why"),
        [
            (lambda shape: {}, "no KV cache"),
            (lambda shape: {"a": [torch.zeros(shape)]}, "layer a is no tensor but list"),
            (lambda shape: {"a": torch.zeros(shape, device="meta")}, "lies on meta"),
            (lambda shape: {"a": torch.zeros(shape).transpose(1, 2)}, "are not 6 adjacent contiguous blocks"),
            (lambda shape: {"a": torch.zeros((12, *shape[1:]))[::2]}, "are not 6 adjacent contiguous blocks"),
            (lambda shape: {"a": torch.zeros((7, *shape[1:]))}, "are not 6 adjacent contiguous blocks"),
            (lambda shape: {"a": torch.zeros(shape), "b": torch.zeros((12, *shape[1:]))}, "differ in size"),
            (_overlapping, "overlap in memory"),
            (lambda shape: {"a": (one := torch.zeros((12, *shape[1:]))), "b": one[:6]}, "overlap in memory"),
        ],
    )
    def test_everything_else_is_refused(self, make: Callable[[Any], dict[str, Any]], why: str) -> None:
        with pytest.raises(BlocksUnusable, match=why):
            find_blocks(make(self.shape), 6, "LBHNC")

    @pytest.mark.parametrize("layout", ["BLHNC", "LBNHC", "LHBNC"])
    def test_so_are_layouts_nobody_has_tried(self, layout: str) -> None:
        with pytest.raises(BlocksUnusable, match=f"layout {layout}, known: LBHNC"):
            find_blocks({"a": torch.zeros(self.shape)}, 6, layout)
