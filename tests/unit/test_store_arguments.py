"""What a store client says about arguments that do not fit, before anything is sent."""

import numpy as np
import pytest
from cachekernels.pages import chain_keys

import cachesvc
from cachesvc.identity import scope_digest

PAGE_BYTES = 64
KEYS = np.zeros((3, 32), np.uint8)
PAGES = np.zeros((3, PAGE_BYTES), np.uint8)


@pytest.fixture
def store(tmp_path):
    """Of a node that is not there: arguments are looked at all the same."""
    return cachesvc.connect_store(f"unix://{tmp_path}/none", namespace="a", page_bytes=PAGE_BYTES)


def read_only():
    pages = PAGES.copy()
    pages.flags.writeable = False
    return pages


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (KEYS[:, :31], r"keys: expected uint8 \[n, 32\], got uint8 \[3, 31\]"),
        (KEYS[0], r"got uint8 \[32\]"),
        (KEYS.astype(np.int8), r"got int8 \[3, 32\]"),
    ],
)
def test_keys_that_do_not_fit(store, keys, message):
    for call in (
        store.contains,
        store.delete,
        lambda keys: store.put(keys, PAGES),
        lambda keys: store.get(keys, PAGES),
    ):
        with pytest.raises(ValueError, match=message):
            call(keys)


@pytest.mark.parametrize(
    ("pages", "message"),
    [
        (PAGES[:2], r"expected uint8 \[3, 64\] .* uint64 \[3\] addresses; got uint8 \[2, 64\]"),
        (PAGES[:, :63], r"got uint8 \[3, 63\]"),
        (PAGES.view(np.int8), r"got int8 \[3, 64\]"),
        (np.zeros((PAGE_BYTES, 3), np.uint8).T, r"strides \[1, 3\]"),
        (np.zeros(2, np.uint64), r"got uint64 \[2\]"),
    ],
)
def test_pages_that_do_not_fit(store, pages, message):
    with pytest.raises(ValueError, match="pages: .*" + message):
        store.put(KEYS, pages)
    with pytest.raises(ValueError, match="out: .*" + message):
        store.get(KEYS, pages)


def test_a_get_into_what_cannot_be_written(store):
    with pytest.raises(ValueError, match="out: expected a writable array"):
        store.get(KEYS, read_only())
    store.put(KEYS, read_only())


@pytest.mark.parametrize("first_page", [-1, 2**32 - 3])
def test_positions_that_do_not_fit(store, first_page):
    with pytest.raises(ValueError, match=f"first_page: expected 0 to 4294967292, got {first_page}"):
        store.put(KEYS, PAGES, first_page=first_page)


@pytest.mark.parametrize("address", ["private", "unix://relative", "tcp://host:1", ""])
def test_addresses_that_are_none(address):
    with pytest.raises(ValueError, match=r" is no address: expected auto or unix:///path/of/the/socket$"):
        cachesvc.connect_store(address, namespace="a", page_bytes=1)


def test_page_keys_name_all_tokens_up_to_their_end():
    tokens = np.arange(1000)
    keys = cachesvc.page_keys(tokens, 64)
    assert keys.shape == (15, 32)
    assert (keys == chain_keys(bytes(32), bytes(32), tokens.astype(np.uint32), 64)).all()
    assert (cachesvc.page_keys(tokens.tolist()[:640], 64) == keys[:10]).all()
    assert (cachesvc.page_keys(tokens[640:], 64, previous=keys[9].tobytes()) == keys[10:]).all()
    assert not (cachesvc.page_keys(tokens, 64, scope=scope_digest(salt="x")) == keys).all(axis=1).any()
    assert cachesvc.page_keys([], 64).shape == (0, 32)


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        ([[1, 2]], r"expected integers \[n\], got int64 \[1, 2\]"),
        ([1.5], r"got float64 \[1\]"),
        ([-1], "expected 0 to 4294967295, got -1 to -1"),
        ([1 << 32], "got 4294967296 to 4294967296"),
    ],
)
def test_tokens_that_are_none(tokens, message):
    with pytest.raises(ValueError, match="tokens: .*" + message):
        cachesvc.page_keys(tokens, 1)


@pytest.mark.parametrize("value", [None, [[0] * 32], b"x" * 32, "keys", 7])
def test_what_is_no_array_is_named(store, value):
    for call in (store.contains, store.delete, lambda keys: store.put(keys, PAGES)):
        with pytest.raises(TypeError, match=r"keys: expected a numpy array, uint8 \[n, 32\]; got"):
            call(value)
    with pytest.raises(TypeError, match=r"pages: expected a numpy array, uint8 \[3, 64\] .*; got"):
        store.put(KEYS, value)
    with pytest.raises(TypeError, match=r"out: expected a numpy array, .*; got"):
        store.get(KEYS, value)


@pytest.mark.parametrize("first_page", [1.0, "1", None, True])
def test_positions_that_are_no_numbers(store, first_page):
    with pytest.raises(TypeError, match="first_page: expected an integer, got"):
        store.put(KEYS, PAGES, first_page=first_page)


@pytest.mark.parametrize("first_page", [10**30, -(10**30), np.int64(-1)])
def test_positions_no_machine_has(store, first_page):
    with pytest.raises(ValueError, match="first_page: expected 0 to 4294967292, got"):
        store.get(KEYS, PAGES.copy(), first_page=first_page)


@pytest.mark.parametrize(
    ("timeout_s", "error"),
    [
        *[(value, TypeError) for value in ("1", True, [])],
        *[(value, ValueError) for value in (-1, float("nan"), float("inf"), 10**400)],
    ],
)
def test_times_that_are_none(store, tmp_path, timeout_s, error):
    with pytest.raises(error, match="timeout_s: expected"):
        store.contains(KEYS, timeout_s=timeout_s)
    for name in ("timeout_s", "connect_timeout_s"):
        with pytest.raises(error, match=f"{name}: expected"):
            cachesvc.connect_store(f"unix://{tmp_path}/none", namespace="a", page_bytes=1, **{name: timeout_s})


@pytest.mark.parametrize(
    ("segment_bytes", "error", "message"),
    [
        (
            [32, 32],
            TypeError,
            r"segment_bytes: expected a numpy array, uint64 \[m\], each above 0 and 64 in all; got list",
        ),
        (np.array([32, 32]), ValueError, r"got int64 \[2\]"),
        (np.array([[32, 32]], np.uint64), ValueError, r"got uint64 \[1, 2\]"),
        (np.array([], np.uint64), ValueError, r"got uint64 \[0\]"),
        (np.array([64, 0], np.uint64), ValueError, "each above 0"),
        (np.array([32, 33], np.uint64), ValueError, "got 65 in all"),
        (np.array([2**63, 2**63, 64], np.uint64), ValueError, "each above 0 and 64 in all"),
        (np.array([64], np.uint64), ValueError, r"pages: expected uint64 \[3, 1\] addresses, got uint64 \[3, 2\]"),
    ],
)
def test_segments_that_do_not_fit(store, segment_bytes, error, message):
    with pytest.raises(error, match=message):
        store.put(KEYS, np.zeros((3, 2), np.uint64), segment_bytes=segment_bytes)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"namespace": 1}, TypeError, "namespace: expected a string, got int"),
        ({"tenant": None}, TypeError, "tenant: expected a string, got NoneType"),
        ({"tenant": "\ud800"}, ValueError, "tenant: expected text"),
        ({"page_bytes": 1.5}, TypeError, "page_bytes: expected an integer, got float"),
        ({"page_bytes": -1}, ValueError, "page_bytes: expected 0 to"),
        (
            {"memory_bytes": 2**64},
            ValueError,
            "memory_bytes: expected 0 to 18446744073709551615, got 18446744073709551616",
        ),
        ({"memory_bytes": "1 GiB"}, TypeError, "memory_bytes: expected an integer, got str"),
    ],
)
def test_openings_that_no_message_carries(tmp_path, changes, error, message):
    with pytest.raises(error, match=message):
        cachesvc.connect_store(f"unix://{tmp_path}/none", **{"namespace": "a", "page_bytes": 1, **changes})


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"page_tokens": 0}, ValueError, "page_tokens: expected 1 to 4294967295, got 0"),
        ({"page_tokens": 2**40}, ValueError, "page_tokens: expected"),
        ({"page_tokens": 1.0}, TypeError, "page_tokens: expected an integer, got float"),
        ({"page_tokens": 1, "scope": "x"}, TypeError, "scope: expected 32 bytes, got str"),
        ({"page_tokens": 1, "previous": b"x"}, ValueError, "previous: expected 32 bytes, got 1"),
    ],
)
def test_key_arguments_that_do_not_fit(arguments, error, message):
    with pytest.raises(error, match=message):
        cachesvc.page_keys([1, 2], **arguments)
