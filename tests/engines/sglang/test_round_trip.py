"""Every byte there and back through the real classes: L1→L2→L3, all memory forgotten, L3→L2→L1."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.engines.sglang import media
from tests.engines.sglang.journeys import TOKENS, goes_and_comes_back, outlives_its_engine
from tests.engines.sglang.processes import Daemon
from tests.engines.sglang.rig import CacheRig, Model, Storage, kv_of

LAYOUTS = {
    "mha": ("page_first", "page_first_direct", "page_head", "layer_first"),
    "mla": ("page_first", "page_first_direct", "layer_first"),
}
SHAPES = [(kind, layout) for kind, layouts in LAYOUTS.items() for layout in layouts]


@pytest.fixture(params=["ours", "file"])
def storage(request: pytest.FixtureRequest, shared_daemon: Daemon, tmp_path: Path) -> Storage:
    """Both backends pass the same tests, so that a failure of one says which side is wrong."""
    if request.param == "file":
        return media.file(tmp_path / "files")
    return media.ours(shared_daemon.address, model_revision=request.node.nodeid)


@pytest.mark.parametrize("core", ["rust", "python"])
@pytest.mark.parametrize(("kind", "layout"), SHAPES)
def test_every_byte_comes_back_from_storage(kind: str, layout: str, core: str, storage: Storage) -> None:
    model = Model(kind, layout)
    outlives_its_engine(lambda: CacheRig(model, storage, core=core), TOKENS, kv_of(model, TOKENS))


@pytest.mark.parametrize(("kind", "layout"), SHAPES)
def test_every_byte_comes_back_by_way_of_flat_pages(
    kind: str, layout: str, shared_daemon: Daemon, request: pytest.FixtureRequest
) -> None:
    """Without `interface_v1` SGLang itself makes flat tensors of pages, and pages of them."""
    storage = media.ours(shared_daemon.address, model_revision=request.node.nodeid, interface_v1=0)
    model = Model(kind, layout)
    kv = kv_of(model, TOKENS)
    with CacheRig(model, storage) as rig:
        goes_and_comes_back(rig, TOKENS, kv)
        rig.lose_page(TOKENS, 2)
        rig.forget()
        assert rig.fetch(TOKENS) == 32


@pytest.mark.parametrize("is_v1", [1, 0])
def test_ranks_of_another_number_have_their_heads_or_nothing(
    is_v1: int, shared_daemon: Daemon, request: pytest.FixtureRequest
) -> None:
    """`tp_lcm_size`: pages of one rank cut by heads are those of two ranks. Flat pages cannot be cut."""
    model = Model(layout="page_head", heads=2)
    kv = kv_of(model, TOKENS)
    storage = media.ours(shared_daemon.address, model_revision=request.node.nodeid, tp_lcm_size=2, interface_v1=is_v1)
    with CacheRig(model, storage) as rig:
        goes_and_comes_back(rig, TOKENS, kv)
    head_bytes = kv.shape[-1] // 2
    for rank in range(2):
        with CacheRig(replace(model, heads=1), storage, ranks=2, rank=rank) as rig:
            assert rig.fetch(TOKENS) == (96 if is_v1 else 0)
            rig.load(TOKENS)
            heads = slice(rank * head_bytes, (rank + 1) * head_bytes)
            assert np.array_equal(rig.on_device(TOKENS), kv[: 96 if is_v1 else 0, :, :, heads])


@pytest.mark.parametrize("length", [15, 16, 17, 95, 96, 97])
def test_prompts_of_every_length_around_whole_pages(length: int, storage: Storage) -> None:
    model = Model()
    tokens, whole = TOKENS[:length], length // 16 * 16
    kv = kv_of(model, tokens)
    with CacheRig(model, storage) as rig:
        if whole:
            rig.compute(tokens, kv)
        rig.forget()
        assert rig.fetch(tokens) == whole
        rig.load(tokens)
        assert np.array_equal(rig.on_device(tokens), kv[:whole])


def test_thirty_two_requests_at_once_with_a_prefix_in_common(storage: Storage) -> None:
    model = Model(layers=2)
    prompts = [[*TOKENS[:64], *range(first, first + 32)] for first in range(5000, 5000 + 32 * 100, 100)]
    with CacheRig(model, storage, device_pages=128, host_pages=512) as rig:
        for tokens in prompts:
            rig.compute(tokens, kv_of(model, tokens))
        rig.forget()
        for handle in [rig.begin_fetch(tokens) for tokens in prompts]:
            rig.end_fetch(handle)
        for tokens in prompts:
            assert rig.load(tokens) == 96
            assert np.array_equal(rig.on_device(tokens), kv_of(model, tokens))
        rig.check()


@pytest.mark.parametrize(("kind", "layout"), SHAPES)
def test_host_memory_serves_what_left_the_device(kind: str, layout: str, storage: Storage) -> None:
    model = Model(kind, layout)
    kv = kv_of(model, TOKENS)
    with CacheRig(model, storage) as rig:
        rig.compute(TOKENS, kv)
        rig.forget_device()
        found = rig.match(TOKENS)
        assert (found.device_prefix_len, found.host_hit_length) == (0, 96)
        rig.load(TOKENS)
        assert np.array_equal(rig.on_device(TOKENS), kv[:96])


def test_prompts_share_their_beginning(storage: Storage) -> None:
    """Two continuations of one prefix: the second run fetches each, of which the device has a part already."""
    model = Model()
    left, right = TOKENS, [*TOKENS[:64], *range(5000, 5048)]
    with CacheRig(model, storage) as rig:
        for tokens in (left, right):
            rig.compute(tokens, kv_of(model, tokens))
        rig.forget()
        assert rig.fetch(left) == 96
        rig.load(left)
        assert rig.fetch(right) == 48
        rig.load(right)
        for tokens in (left, right):
            pages = len(tokens) // 16 * 16
            assert np.array_equal(rig.on_device(tokens), kv_of(model, tokens)[:pages])


def test_more_pages_than_one_batch(storage: Storage) -> None:
    """SGLang passes 128 pages a call; 300 pages are three of them."""
    model = Model(page_size=1, layers=2)
    tokens = list(range(7000, 7300))
    kv = kv_of(model, tokens)
    with CacheRig(model, storage, device_pages=512, host_pages=1024) as rig:
        goes_and_comes_back(rig, tokens, kv)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float8_e4m3fn], ids=str)
def test_other_widths(dtype: torch.dtype, storage: Storage) -> None:
    model = Model(dtype=dtype)
    kv = kv_of(model, TOKENS)
    with CacheRig(model, storage) as rig:
        goes_and_comes_back(rig, TOKENS, kv)


def test_eagle_keys_name_pairs_of_tokens(storage: Storage) -> None:
    """With speculative decoding a key's unit is a token and its successor: pages of the same tokens without it, or with
    another successor of the last one, are others."""
    model = Model(is_eagle=True)
    tokens = TOKENS[:97]  # the pair of the 96th token needs the 97th
    kv = kv_of(model, tokens)
    with CacheRig(model, storage) as rig:
        goes_and_comes_back(rig, tokens, kv)
        rig.forget()
        assert rig.fetch([*tokens[:96], 1]) == 80, "another successor"
    with CacheRig(replace(model, is_eagle=False), storage) as plain:
        assert plain.fetch(tokens) == 0


@pytest.mark.parametrize(
    ("stored", "asked"),
    [
        (a, b)
        for a, b in itertools.permutations(
            (
                {},
                {"extra_key": "adapter-1"},
                {"extra_key": "adapter-2"},
                {"cache_salt": "tenant-1"},
                {"extra_key": "adapter-1", "cache_salt": "tenant-1"},
            ),
            2,
        )
    ],
    ids=str,
)
def test_adapters_and_salts_keep_apart(
    stored: dict[str, str], asked: dict[str, str], shared_daemon: Daemon, request: pytest.FixtureRequest
) -> None:
    model = Model()
    kv = kv_of(model, TOKENS, identity=str(stored))
    with CacheRig(model, media.ours(shared_daemon.address, model_revision=request.node.nodeid)) as rig:
        rig.compute(TOKENS, kv, **stored)
        rig.forget()
        assert rig.fetch(TOKENS, **asked) == 0
        assert rig.fetch(TOKENS, **stored) == 96
        rig.load(TOKENS, **stored)
        assert np.array_equal(rig.on_device(TOKENS, **stored), kv[:96])
