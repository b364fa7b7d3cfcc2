"""Identity: any difference is another namespace, and every difference is named with both values."""

from dataclasses import fields, replace

import pytest

from cachesvc.identity import NO_SCOPE, Identity, encode_value, scope_digest

BASE = Identity(
    model_id="m",
    weights_digest="r1",
    config_digest="c",
    dtype="bfloat16",
    page_size=16,
    num_layers=4,
    num_kv_heads=2,
    head_dim=8,
)
OTHER = {
    "model_id": "n",
    "weights_digest": "r2",
    "config_digest": "d",
    "dtype": "float16",
    "page_size": 32,
    "num_layers": 5,
    "num_kv_heads": 4,
    "head_dim": 16,
    "kv_layout": "layer_first",
    "kv_layout_version": 2,
    "pools": ("kv", "draft"),
    "rank_shape": (("tp", 2),),
    "engine_layout": "x",
    "key_scheme": "cs2",
}


def test_every_field_has_another_value_here():
    assert set(OTHER) == {field.name for field in fields(Identity)}


@pytest.mark.parametrize("name", sorted(OTHER))
def test_each_field_changes_the_namespace_and_is_named_with_both_values(name):
    other = replace(BASE, **{name: OTHER[name]})
    assert other.namespace() != BASE.namespace()
    assert BASE.differences(other) == [f"{name}: {getattr(BASE, name)!r} here, {OTHER[name]!r} requested"]


def test_the_namespace_is_a_fixed_function_of_the_fields():
    assert BASE.namespace().hex() == "9c2abf77dd80f7993ab0f2c49e84903c8945c23367d98849a5a9fed29c4fd095"
    assert replace(BASE).namespace() == BASE.namespace()


def test_page_bytes_is_k_and_v_of_all_layers():
    assert BASE.page_bytes() == 2 * 4 * 16 * 2 * 8 * 2


@pytest.mark.parametrize("change", [{"page_size": 0}, {"num_layers": -1}, {"dtype": "int3"}])
def test_impossible_geometry_is_refused_by_name(change):
    with pytest.raises(ValueError, match=next(iter(change))):
        replace(BASE, **change)


def test_encoding_keeps_types_and_boundaries_apart():
    values = ["1", 1, b"1", ("1",), ("1", ""), ("", "1"), ("ab", "c"), ("a", "bc"), (("a",), "bc"), (), ""]
    assert len({encode_value(value) for value in values}) == len(values)


def test_scope_is_fixed_length_and_zero_without_parts():
    assert scope_digest() == NO_SCOPE
    parts = ({"tenant": "a"}, {"salt": "a"}, {"adapter_digest": b"a"}, {"tenant": "a", "salt": "a"})
    scopes = [scope_digest(**part) for part in parts]
    assert len(set(scopes)) == 4
    assert {len(scope) for scope in scopes} == {32}


def test_a_pool_this_version_cannot_keep_is_named():
    assert replace(BASE, pools=("kv", "mamba")).unsupported_pools() == ["mamba"]
    assert BASE.unsupported_pools() == []
