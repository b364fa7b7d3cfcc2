"""Everything that decides the bytes of a page is in its namespace; what it is served under is not."""

import json
from dataclasses import fields, replace
from types import SimpleNamespace

import numpy as np
import pytest
from safetensors.numpy import save_file

from engine_plugin.models.checkpoint import FilesSeen, IdentityUnknown
from engine_plugin.sglang import identity
from engine_plugin.sglang.identity import PoolIdentity

POOL = PoolIdentity(
    model="m",
    engine="sglang 1",
    pool="kv",
    kind="MHA",
    dtype="bfloat16",
    geometry=(("head_num", 2), ("head_dim", 16)),
    layout="page_first",
    form="segments",
    format_tag="None",
    page_size=64,
    segment_bytes=(100, 100),
    layers=(0, 4),
    is_replicated=False,
    rank_shape=(("tp", 2),),
    rank=(0,),
)
CHANGES = {
    "geometry": (("head_num", 4), ("head_dim", 8)),
    "page_size": 32,
    "segment_bytes": (200,),
    "layers": (4, 8),
    "is_replicated": True,
    "rank_shape": (("tp", 4),),
    "rank": (1,),
}


def test_every_field_counts():
    namespaces = {POOL.namespace()}
    for one in fields(POOL):
        namespaces.add(replace(POOL, **{one.name: CHANGES.get(one.name, "other")}).namespace())
    assert len(namespaces) == 1 + len(fields(POOL))
    assert replace(POOL).namespace() == POOL.namespace()
    assert len(POOL.namespace().encode()) <= 256, "as long as the node takes it"


def test_the_namespace_of_a_pool_stays_what_it_is():
    assert POOL.namespace() == "sglang/29fa32f8a906d90a4fb193df3603d372c456bfb8d178258bfbc218805e28b8a8"


def model_identity(arguments, revision, seen=None):
    """In a process of its own, or one that has seen files before."""
    return identity.model_identity(arguments, revision, seen or FilesSeen())


def args(path, **changes):
    plain = {
        "model_path": str(path),
        "revision": None,
        "download_dir": None,
        "load_format": "auto",
        "dtype": "auto",
        "quantization": None,
        "quantization_param_path": None,
        "kv_cache_dtype": "auto",
        "json_model_override_args": "{}",
        "speculative_algorithm": None,
        "speculative_draft_model_path": None,
        "speculative_draft_model_revision": None,
        "served_model_name": "name",
        "modelopt_quant": None,
        "quantize_and_serve": False,
        "rl_quant_profile": None,
        "dllm_algorithm": None,
        "speculative_draft_model_quantization": None,
        "enable_lora": None,
        "lora_paths": None,
        "uno_lora_path": None,
    }
    return SimpleNamespace(**{**plain, **changes})


@pytest.fixture
def checkpoint(tmp_path):
    return made(tmp_path / "model")


def made(folder, seed=0, **config):
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "_name_or_path": str(folder), **config}))
    weights = np.random.default_rng(seed).standard_normal((64, 64)).astype(np.float32)
    save_file({"w": weights}, folder / "model.safetensors")
    return folder


def test_a_copy_of_a_model_under_other_names_is_the_same(checkpoint, tmp_path):
    copy = made(tmp_path / "copy")
    assert model_identity(args(copy, served_model_name="else"), None) == model_identity(args(checkpoint), None)


@pytest.mark.parametrize(
    "changes",
    [
        {"kv_cache_dtype": "fp8_e5m2"},
        {"dtype": "float16"},
        {"quantization": "fp8"},
        {"quantization_param_path": "/scales.json"},
        {"modelopt_quant": "fp8"},
        {"quantize_and_serve": True},
        {"rl_quant_profile": "/profile"},
        {"dllm_algorithm": "LowConfidence"},
        {"speculative_draft_model_quantization": "fp8"},
        {"json_model_override_args": '{"rope_theta": 1}'},
        {"speculative_algorithm": "EAGLE"},
        {"load_format": "dummy"},
    ],
    ids=str,
)
def test_arguments_that_decide_bytes(checkpoint, changes):
    assert model_identity(args(checkpoint, **changes), None) != model_identity(args(checkpoint), None)


def test_weights_and_configuration_decide_bytes(checkpoint, tmp_path):
    names = {
        model_identity(args(folder), revision)
        for folder in (checkpoint, made(tmp_path / "a", seed=1), made(tmp_path / "b", rope_theta=1))
        for revision in (None, "r1", "r2")
    }
    # Two revisions of models whose configuration is the same are told apart by the revision alone.
    assert len(names) == 3 + 2 * 2


def test_a_draft_model_counts(checkpoint, tmp_path):
    draft = made(tmp_path / "draft", seed=2)
    with_draft = model_identity(args(checkpoint, speculative_draft_model_path=str(draft)), None)
    other = model_identity(args(checkpoint, speculative_draft_model_path=str(made(tmp_path / "d", seed=3))), None)
    assert len({with_draft, other, model_identity(args(checkpoint), None)}) == 3


def test_scales_of_the_cache_count_by_their_content(checkpoint, tmp_path):
    scales = tmp_path / "scales.json"
    names = set()
    for content in ("1.0", "2.0"):
        scales.write_text(content)
        names.add(model_identity(args(checkpoint, quantization_param_path=str(scales)), None))
    assert len(names) == 2


def adapter(folder, content):
    folder.mkdir(exist_ok=True)
    (folder / "adapter_config.json").write_text("{}")
    (folder / "adapter_model.safetensors").write_bytes(content)
    return str(folder)


def with_adapters(checkpoint, *adapters, **changes):
    refs = [SimpleNamespace(lora_name=name, lora_path=path) for name, path in adapters]
    return args(checkpoint, **{"enable_lora": True, "lora_paths": refs, **changes})


def test_adapters_of_the_launch_line_count_by_their_content(checkpoint, tmp_path):
    """SGLang's keys have their names and paths alone, which stay when an adapter is trained on."""
    first, second = ("a", adapter(tmp_path / "a", b"1")), ("b", adapter(tmp_path / "b", b"2"))
    before = model_identity(with_adapters(checkpoint, first, second), None)
    assert before == model_identity(with_adapters(checkpoint, second, first), None)
    others = [
        model_identity(args(checkpoint), None),
        model_identity(with_adapters(checkpoint, first), None),
        model_identity(with_adapters(checkpoint, first, second), "r1"),
    ]
    adapter(tmp_path / "a", b"3")
    others += [
        model_identity(with_adapters(checkpoint, first, second), None),
        model_identity(with_adapters(checkpoint, first, second), "r1"),
        model_identity(args(checkpoint, uno_lora_path=first[1]), None),
    ]
    assert len({before, *others}) == 7
    assert model_identity(with_adapters(checkpoint, first, enable_lora=False), None) == others[0], "not loaded at all"


def test_files_that_changed_under_a_running_engine_name_it_no_longer(checkpoint, tmp_path):
    """Whether it has loaded the new ones meanwhile is not known."""
    seen = FilesSeen()
    folder = adapter(tmp_path / "a", b"1")
    arguments = with_adapters(checkpoint, ("a", folder))
    assert model_identity(arguments, None, seen) == model_identity(arguments, None, seen)
    adapter(tmp_path / "a", b"22")
    for revision in (None, "r1"):
        with pytest.raises(IdentityUnknown, match=r"files at .*/a have changed since .*; start the engine anew"):
            model_identity(arguments, revision, seen)
    with (checkpoint / "model.safetensors").open("ab") as weights:
        weights.write(b"more")
    with pytest.raises(IdentityUnknown, match=r"files at .*model have changed since .* model_revision"):
        model_identity(args(checkpoint), None, seen)
    assert model_identity(args(checkpoint), "r2", seen)
    assert model_identity(args(made(tmp_path / "elsewhere", seed=1)), None, seen), "loaded from another folder"


def test_an_adapter_that_cannot_be_read(checkpoint, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    (tmp_path / "empty").mkdir()
    for path in ("gone", "empty"):
        gone = with_adapters(checkpoint, ("a", str(tmp_path / path)))
        with pytest.raises(IdentityUnknown, match=rf"no adapter was found at .*{path}.* model_revision"):
            model_identity(gone, None)
        assert model_identity(gone, "r1") != model_identity(gone, "r2")


def test_weights_that_nothing_names(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(IdentityUnknown, match=r"no weight files were found for .*gone.* model_revision"):
        model_identity(args(tmp_path / "gone"), None)
    one, other = (model_identity(args(tmp_path / name), "r1") for name in ("gone", "away"))
    assert one != other, "without a configuration to look at, a revision is one of a name"
