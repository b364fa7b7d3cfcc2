"""The stored page header: equal to its description, and nothing damaged passes."""

import dataclasses
import hashlib
import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import xxhash
from cachekernels import _core, pages
from cachekernels.arrays import U8, U64
from cachekernels.pages import PageCheck
from hypothesis import given
from hypothesis import strategies as st

from tests.helpers.lost_memory import LostMemory
from tests.oracles import page_header as oracle

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "page_header.json").read_text())
NAMESPACE = hashlib.sha256(b"namespace").digest()
POOL, RANK = 3, 517


class Batch:
    """n pages in memory with their ids; headers come from encode_headers."""

    def __init__(self, num_pages: int = 3, payload_bytes: int = 1000, header_bytes: int = 128) -> None:
        rng = np.random.default_rng(num_pages * 7 + payload_bytes)
        self.keys = rng.integers(0, 256, (num_pages, 32), dtype=np.uint8)
        self.payloads = rng.integers(0, 256, (num_pages, payload_bytes), dtype=np.uint8)
        self.ids = pages.object_ids(self.keys, POOL, RANK)
        self.headers = pages.encode_headers(self.ids, NAMESPACE, self.addresses(), payload_bytes, header_bytes)

    def addresses(self) -> U64:
        return addresses_of(self.payloads)

    def check(self, headers: U8 | None = None, namespace: bytes = NAMESPACE, payload_bytes: int | None = None) -> list:
        length = self.payloads.shape[1] if payload_bytes is None else payload_bytes
        seen = self.headers if headers is None else headers
        return [PageCheck(c) for c in pages.check_pages(seen, self.ids, namespace, self.addresses(), length)]

    def header_with(self, index: int = 1, **changes: object) -> U8:
        """All headers, one of them re-encoded with other field values and a right crc."""
        changed = dataclasses.replace(oracle.decode(self.headers[index].tobytes()), **changes).encode()
        headers = self.headers.copy()
        headers[index] = np.frombuffer(changed, np.uint8)[: headers.shape[1]]
        return headers


def addresses_of(rows: U8) -> U64:
    start, stride = rows.ctypes.data, rows.strides[0]
    return np.array([start + i * stride for i in range(len(rows))], np.uint64)


OK3 = [PageCheck.OK] * 3


@pytest.mark.parametrize("header_bytes", [128, 4096])
@pytest.mark.parametrize("payload_bytes", [0, 1, 16, 17, 128, 240, 241, 1000, 4096, 100_001])
def test_headers_equal_their_description(header_bytes: int, payload_bytes: int) -> None:
    batch = Batch(3, payload_bytes, header_bytes)
    assert batch.headers.shape == (3, header_bytes)
    for key, payload, header in zip(batch.keys, batch.payloads, batch.headers, strict=True):
        expected = oracle.describe(key.tobytes(), NAMESPACE, payload.tobytes(), header_bytes, POOL, RANK)
        assert oracle.decode(header.tobytes()) == expected
        assert header.tobytes() == expected.encode()
    assert batch.check() == OK3


def test_golden_file() -> None:
    payload = b"".join(hashlib.sha256(b"golden payload %d" % i).digest() for i in range(200))
    data = np.frombuffer(payload, np.uint8).reshape(1, -1)
    ids = pages.object_ids(np.frombuffer(bytes.fromhex(GOLDEN["key"]), np.uint8).reshape(1, 32), 3, 5)
    namespace = bytes.fromhex(GOLDEN["namespace"])
    header = pages.encode_headers(ids, namespace, addresses_of(data), len(payload), 128)
    assert header.tobytes().hex() == GOLDEN["header_128"]
    golden = np.frombuffer(bytes.fromhex(GOLDEN["header_128"]), np.uint8).reshape(1, 128)
    assert list(pages.check_pages(golden, ids, namespace, addresses_of(data), len(payload))) == [PageCheck.OK]


def test_object_ids() -> None:
    keys = np.arange(64, dtype=np.uint8).reshape(2, 32)
    ids = pages.object_ids(keys, 0x1234, 0xFFFF)
    assert ids[1].tobytes() == keys[1].tobytes() + b"\x34\x12\xff\xff"
    assert pages.object_ids(keys)[0].tobytes() == keys[0].tobytes() + bytes(4)
    with pytest.raises(TypeError):
        pages.object_ids(keys, 0x10000)


@pytest.mark.parametrize("header_bytes", pages.HEADER_BYTES)
def test_what_a_header_claims_can_be_read_without_knowing_it(header_bytes: int) -> None:
    ids, payload = pages.object_ids(np.zeros((2, 32), np.uint8)), np.zeros((2, 640), np.uint8)
    addresses = np.uint64(payload.ctypes.data) + np.arange(2, dtype=np.uint64) * np.uint64(640)
    headers = pages.encode_headers(ids, bytes(range(32)), addresses, 640, header_bytes)
    namespaces, raw_bytes = pages.header_claims(headers)
    assert [row.tobytes() for row in namespaces] == [bytes(range(32))] * 2
    assert raw_bytes.tolist() == [640, 640]


def test_no_flipped_bit_of_a_header_passes() -> None:
    batch = Batch(1, 64)
    good = batch.headers.copy()
    for bit in range(128 * 8):
        headers = good.copy()
        headers[0, bit // 8] ^= np.uint8(1 << bit % 8)
        verdict = batch.check(headers)[0]
        expected = {0: PageCheck.FOREIGN, 1: PageCheck.NEWER}.get(bit // 64 if bit < 96 else 2, PageCheck.BAD_HEADER)
        assert verdict == expected, f"bit {bit}"


def test_no_flipped_bit_of_a_payload_passes() -> None:
    batch = Batch(1, 257)
    for bit in range(257 * 8):
        batch.payloads[0, bit // 8] ^= np.uint8(1 << bit % 8)
        assert batch.check() == [PageCheck.BAD_CHECKSUM]
        batch.payloads[0, bit // 8] ^= np.uint8(1 << bit % 8)
    assert batch.check() == [PageCheck.OK]


@pytest.mark.parametrize(
    ("changes", "verdict"),
    [
        ({"version": 2}, PageCheck.NEWER),
        ({"codec": 1}, PageCheck.NEWER),
        ({"header_bytes": 4096}, PageCheck.BAD_HEADER),
        ({"key": bytes(32)}, PageCheck.WRONG_KEY),
        ({"pool": POOL + 1}, PageCheck.WRONG_KEY),
        ({"rank": RANK + 1}, PageCheck.WRONG_KEY),
        ({"namespace": bytes(32)}, PageCheck.WRONG_KEY),
        ({"stored_bytes": 999}, PageCheck.WRONG_LENGTH),
        ({"raw_bytes": 1001}, PageCheck.WRONG_LENGTH),
        ({"checksum": bytes(16)}, PageCheck.BAD_CHECKSUM),
    ],
)
def test_each_field_is_checked(changes: dict, verdict: PageCheck) -> None:
    batch = Batch()
    assert batch.check(batch.header_with(1, **changes)) == [PageCheck.OK, verdict, PageCheck.OK]


def test_a_page_asked_for_differently_is_not_ours() -> None:
    batch = Batch()
    assert batch.check(namespace=bytes(32)) == [PageCheck.WRONG_KEY] * 3
    assert batch.check(payload_bytes=999) == [PageCheck.WRONG_LENGTH] * 3
    assert batch.check(batch.headers[[1, 0, 2]]) == [PageCheck.WRONG_KEY, PageCheck.WRONG_KEY, PageCheck.OK]
    padded = np.zeros((3, 4096), np.uint8)
    padded[:, :128] = batch.headers
    assert batch.check(padded) == [PageCheck.BAD_HEADER] * 3


def test_objects_that_are_not_headers() -> None:
    batch = Batch()
    headers = batch.headers.copy()
    headers[0] = 0  # a file whose data never reached the disk
    headers[1] = np.frombuffer((b"\x89PNG\r\n\x1a\n" * 16), np.uint8)
    assert batch.check(headers) == [PageCheck.BAD_HEADER, PageCheck.FOREIGN, PageCheck.OK]


@pytest.fixture(params=[True, False], ids=["avx2 where there is", "plain"])
def _checksum_path(request: pytest.FixtureRequest) -> Iterator[None]:
    _core.allow_avx2_checksum(request.param)
    yield
    _core.allow_avx2_checksum(True)


@pytest.mark.usefixtures("_checksum_path")
def test_checksums_equal_xxhash() -> None:
    data = np.random.default_rng(5).integers(0, 256, 70_000, dtype=np.uint8)
    lengths = np.array([*range(520), 1023, 1024, 1025, 4096, 65_537], np.uint64)
    addresses = np.full(len(lengths), data.ctypes.data + 3, np.uint64)
    found = pages.xxh3_128(addresses, lengths)
    for length, checksum in zip(lengths.tolist(), found, strict=True):
        assert checksum.tobytes() == xxhash.xxh3_128_digest(data[3 : 3 + length])


@given(st.binary(max_size=200))
def test_crc_equals_its_definition(data: bytes) -> None:
    assert _core.crc32c(data) == oracle.crc32c(data)


def test_crc_of_the_published_check_value() -> None:
    assert _core.crc32c(b"123456789") == 0xE3069283


def test_lost_memory_is_an_error_not_a_crash() -> None:
    batch = Batch()
    addresses = batch.addresses()
    with LostMemory() as lost:
        addresses[1] = lost.address
        with pytest.raises(_core.MemoryFault, match="item 1 of the batch"):
            pages.encode_headers(batch.ids, NAMESPACE, addresses, 1000, 128)
        with pytest.raises(_core.MemoryFault, match="item 1 of the batch"):
            pages.check_pages(batch.headers, batch.ids, NAMESPACE, addresses, 1000)
        with pytest.raises(OSError, match="item 1 of the batch"):
            pages.xxh3_128(addresses, np.full(3, 1000, np.uint64))
    assert batch.check() == OK3


def test_bad_arguments_say_what_was_expected() -> None:
    batch = Batch()
    with pytest.raises(ValueError, match="header_bytes: expected 128 or 4096"):
        pages.encode_headers(batch.ids, NAMESPACE, batch.addresses(), 1000, 512)
    with pytest.raises(ValueError, match=r"ids: expected shape \[n, 36\], got \[3, 32\]"):
        pages.encode_headers(batch.keys, NAMESPACE, batch.addresses(), 1000, 128)
    with pytest.raises(ValueError, match=r"addresses: expected shape \[3\], got \[2\]"):
        pages.encode_headers(batch.ids, NAMESPACE, batch.addresses()[:2], 1000, 128)
    with pytest.raises(ValueError, match="headers: expected at least 128 bytes a row"):
        batch.check(batch.headers[:, :64].copy())
    with pytest.raises(ValueError, match="namespace: expected 32 bytes, got 31"):
        batch.check(namespace=bytes(31))
