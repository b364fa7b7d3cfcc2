"""Page keys: equal to their definition, to the golden file, and in every process."""

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from cachekernels import _core, pages
from hypothesis import given
from hypothesis import strategies as st

from tests.oracles import page_keys as oracle

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "page_keys.json").read_text())
NAMESPACE = hashlib.sha256(b"namespace").digest()
SCOPE = hashlib.sha256(b"scope").digest()


def rows(keys: np.ndarray) -> list[bytes]:
    return [key.tobytes() for key in keys]


@given(
    tokens=st.lists(st.integers(0, 2**32 - 1), max_size=200),
    page_size=st.integers(1, 70),
    previous=st.none() | st.binary(min_size=32, max_size=32),
)
def test_chain_equals_its_definition(tokens: list[int], page_size: int, previous: bytes | None) -> None:
    keys = pages.chain_keys(NAMESPACE, SCOPE, np.array(tokens, np.uint32), page_size, previous)
    assert keys.shape == (len(tokens) // page_size, 32)
    assert rows(keys) == oracle.chain_keys(NAMESPACE, SCOPE, tokens, page_size, previous)


def test_a_chain_can_be_continued() -> None:
    tokens = np.arange(64, dtype=np.uint32)
    whole = pages.chain_keys(NAMESPACE, SCOPE, tokens, 8)
    tail = pages.chain_keys(NAMESPACE, SCOPE, tokens[24:], 8, whole[2].tobytes())
    assert rows(tail) == rows(whole[3:])


def test_every_input_changes_the_key() -> None:
    tokens = np.arange(16, dtype=np.uint32)
    keys = {
        pages.chain_keys(NAMESPACE, SCOPE, tokens, 8)[1].tobytes(),
        pages.chain_keys(SCOPE, SCOPE, tokens, 8)[1].tobytes(),
        pages.chain_keys(NAMESPACE, NAMESPACE, tokens, 8)[1].tobytes(),
        pages.chain_keys(NAMESPACE, SCOPE, tokens[::-1].copy(), 8)[1].tobytes(),
        pages.chain_keys(NAMESPACE, SCOPE, tokens, 4)[3].tobytes(),
        pages.chain_keys(NAMESPACE, SCOPE, tokens[8:], 8)[0].tobytes(),
        pages.wrap_hashes("sha256", NAMESPACE, SCOPE, np.zeros((1, 32), np.uint8)).tobytes(),
    }
    assert len(keys) == 7


@pytest.mark.parametrize("scheme", ["sha256", "sha256_cbor", "blake3"])
def test_wrapped_hashes_equal_their_definition(scheme: str) -> None:
    hashes = np.arange(96, dtype=np.uint8).reshape(3, 32)
    keys = pages.wrap_hashes(scheme, NAMESPACE, SCOPE, hashes)
    assert rows(keys) == [oracle.wrap_hash(scheme, NAMESPACE, SCOPE, row.tobytes()) for row in hashes]


@pytest.mark.parametrize("path", [_core.Sha256Path.portable, _core.Sha256Path.automatic])
@pytest.mark.parametrize("scheme", ["sha256", "sha256_cbor"])
@pytest.mark.parametrize("count", range(10))
def test_so_do_any_number_of_them(path: _core.Sha256Path, scheme: str, count: int) -> None:
    """They are worked through in pairs, where the rest of the message is one block: with the longer name it just is."""
    _core.select_sha256_path(path)
    hashes = np.random.default_rng(count).integers(0, 256, (count, 32), np.uint8)
    try:
        keys = pages.wrap_hashes(scheme, NAMESPACE, SCOPE, hashes)
    finally:
        _core.select_sha256_path(_core.Sha256Path.automatic)
    assert rows(keys) == [oracle.wrap_hash(scheme, NAMESPACE, SCOPE, row.tobytes()) for row in hashes]


@given(st.lists(st.binary(min_size=32, max_size=32), max_size=40), st.booleans())
def test_hashes_are_read_from_their_digits(hashes: list[bytes], is_upper: bool) -> None:
    texts = [digest.hex().upper() if is_upper else digest.hex() for digest in hashes]
    for sequence in (texts, tuple(texts)):
        read = pages.hashes_from_hex(sequence)
        assert read.shape == (len(hashes), 32)
        assert rows(read) == hashes


@pytest.mark.parametrize("index", [0, 5, 39])
@pytest.mark.parametrize(
    "text",
    ["", "a" * 63, "a" * 65, *("a" * at + bad + "a" * (63 - at) for at in (0, 31, 63) for bad in "/:@G`g \0\x7f"),
     "a" * 62 + "é", "é" * 32, "é" * 64, "٣" * 64, "a" * 63 + "\udc80", "0x" + "a" * 62],
)  # fmt: skip
def test_what_is_no_hash_is_named(index: int, text: str) -> None:
    texts = ["0123456789abcdefABCDEF".ljust(64, "f")] * 40
    texts[index] = text
    with pytest.raises(ValueError, match=rf"hashes\[{index}\]: expected 64 hexadecimal digits, got '"):
        pages.hashes_from_hex(texts)


@pytest.mark.parametrize("one", [b"a" * 64, None, 7, ["a" * 64]])
def test_what_is_no_text_is_named(one: object) -> None:
    with pytest.raises(TypeError, match=r"hashes\[1\]: expected str, got "):
        pages.hashes_from_hex(["a" * 64, one])  # type: ignore[list-item]


@pytest.mark.parametrize("scheme", ["xxhash", "xxhash_cbor", "xxh3_128", "builtin", "sha256_cbor_64bit", "SHA256", ""])
def test_weak_schemes_are_refused_by_name(scheme: str) -> None:
    with pytest.raises(ValueError, match="collision resistant; accepted: sha256, sha256_cbor, blake3"):
        pages.wrap_hashes(scheme, NAMESPACE, SCOPE, np.zeros((1, 32), np.uint8))


def test_a_truncated_hash_is_refused() -> None:
    with pytest.raises(ValueError, match="'sha256' has 32 bytes, got 8"):
        pages.wrap_hashes("sha256", NAMESPACE, SCOPE, np.zeros((1, 8), np.uint8))


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"namespace": b"short"}, ValueError, "namespace: expected 32 bytes, got 5"),
        ({"scope": bytes(33)}, ValueError, "scope: expected 32 bytes, got 33"),
        ({"previous": b""}, ValueError, "previous: expected 32 bytes, got 0"),
        ({"page_size": 0}, ValueError, "page_size: expected at least 1"),
        ({"page_size": -4}, ValueError, "page_size: expected at least 1"),
        ({"tokens": np.zeros(8, np.int64)}, TypeError, "tokens: expected dtype uint32, got int64"),
        ({"tokens": np.zeros((2, 4), np.uint32)}, ValueError, r"tokens: expected shape \[n\], got \[2, 4\]"),
        ({"tokens": np.zeros(16, np.uint32)[::2]}, ValueError, "tokens: expected a C-contiguous array"),
        ({"tokens": [1, 2, 3]}, TypeError, "list"),
    ],
)
def test_bad_arguments_say_what_was_expected(change: dict, error: type[Exception], message: str) -> None:
    arguments = {"namespace": NAMESPACE, "scope": SCOPE, "tokens": np.zeros(8, np.uint32), "page_size": 4}
    with pytest.raises(error, match=message):
        pages.chain_keys(**(arguments | change))


def golden_keys() -> dict[str, list[str]]:
    """What the golden file holds; also the body of the child processes below."""
    namespace, scope = bytes.fromhex(GOLDEN["namespace"]), bytes.fromhex(GOLDEN["scope"])
    tokens = np.array(GOLDEN["tokens"], np.uint32)
    hashes = np.frombuffer(bytes.fromhex("".join(GOLDEN["hashes"])), np.uint8).reshape(-1, 32)
    found = {f"page_{size}": pages.chain_keys(namespace, scope, tokens, size) for size in (1, 16, 64)}
    found["wrap_sha256"] = pages.wrap_hashes("sha256", namespace, scope, hashes)
    found["wrap_sha256_cbor"] = pages.wrap_hashes("sha256_cbor", namespace, scope, hashes)
    return {name: [key.tobytes().hex() for key in keys] for name, keys in found.items()}


def test_golden_file() -> None:
    assert golden_keys() == GOLDEN["keys"]


def test_golden_file_agrees_with_the_oracle() -> None:
    namespace, scope = bytes.fromhex(GOLDEN["namespace"]), bytes.fromhex(GOLDEN["scope"])
    for size in (1, 16, 64):
        expected = [key.hex() for key in oracle.chain_keys(namespace, scope, GOLDEN["tokens"], size)]
        assert GOLDEN["keys"][f"page_{size}"] == expected


def test_keys_do_not_depend_on_the_process() -> None:
    """T14: PYTHONHASHSEED unset, 0, 1 and random give the golden keys."""
    program = "import json; from tests.unit.test_page_keys import golden_keys; print(json.dumps(golden_keys()))"
    base = {name: value for name, value in os.environ.items() if name != "PYTHONHASHSEED"}
    base["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    seeds: list[dict[str, str]] = [{}, {"PYTHONHASHSEED": "0"}, {"PYTHONHASHSEED": "1"}, {"PYTHONHASHSEED": "random"}]
    children = [
        subprocess.Popen([sys.executable, "-c", program], env=base | seed, stdout=subprocess.PIPE, text=True)
        for seed in seeds
    ]
    answers = [child.communicate()[0] for child in children]
    assert [child.returncode for child in children] == [0] * 4
    assert [json.loads(answer) for answer in answers] == [GOLDEN["keys"]] * 4


def test_both_paths_give_the_golden_keys() -> None:
    for path in (_core.Sha256Path.portable, _core.Sha256Path.automatic):
        _core.select_sha256_path(path)
        assert golden_keys() == GOLDEN["keys"]
