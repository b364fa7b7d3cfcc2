"""SHA-256 against hashlib, on every path this CPU can run."""

import hashlib
from collections.abc import Iterator

import pytest
from cachekernels import _core
from hypothesis import given
from hypothesis import strategies as st

Path = _core.Sha256Path
PATHS = [path for path in (Path.portable, Path.sha_ni) if _core.sha256_path_supported(path)]


@pytest.fixture(params=PATHS, ids=lambda path: path.name)
def path(request: pytest.FixtureRequest) -> Iterator[Path]:
    _core.select_sha256_path(request.param)
    yield request.param
    _core.select_sha256_path(Path.automatic)


def test_every_length_around_the_block_size(path: Path) -> None:
    assert _core.sha256_path() == path
    message = bytes((7 * i) & 0xFF for i in range(300))
    for length in range(len(message)):
        assert _core.sha256(message[:length]) == hashlib.sha256(message[:length]).digest()


def test_long_message(path: Path) -> None:
    message = bytes(range(256)) * 1000
    assert _core.sha256(message) == hashlib.sha256(message).digest()


@given(st.binary(max_size=1000))
def test_paths_agree(message: bytes) -> None:
    expected = hashlib.sha256(message).digest()
    for each in PATHS:
        _core.select_sha256_path(each)
        assert _core.sha256(message) == expected
    _core.select_sha256_path(Path.automatic)


def test_the_fast_path_is_taken_where_there_is_one() -> None:
    assert _core.sha256_path() == PATHS[-1]
