"""Pages as the outside world knows them: their keys, their object ids, and the header each is stored with.

Every function is pure, takes whole batches, releases the GIL and may run in any thread. Addresses are of this process;
whoever passes them keeps the memory mapped during the call. A page whose memory the kernel took away (SIGBUS) raises
MemoryFault (an OSError), and the batch has no result.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum

from cachekernels import _core
from cachekernels.arrays import U8, U32, U64, Keys, ObjectIds

HEADER_BYTES = (128, 4096)


class PageCheck(IntEnum):
    """What a stored page turned out to be. FOREIGN and NEWER are left alone; those from BAD_HEADER on are corrupt."""

    OK = _core.PageCheck.ok.value
    FOREIGN = _core.PageCheck.foreign.value  # unknown magic
    NEWER = _core.PageCheck.newer.value  # unknown version or codec
    BAD_HEADER = _core.PageCheck.bad_header.value  # header damaged, all zero, or of another header size
    WRONG_KEY = _core.PageCheck.wrong_key.value  # another page's id or namespace
    WRONG_LENGTH = _core.PageCheck.wrong_length.value
    BAD_CHECKSUM = _core.PageCheck.bad_checksum.value


def chain_keys(namespace: bytes, scope: bytes, tokens: U32, page_size: int, previous: bytes | None = None) -> Keys:
    """The keys of the whole pages of `tokens`, [len(tokens) // page_size, 32]; a partial page at the end has none.

    namespace and scope are digests of 32 bytes. `previous`: the key of the page right before tokens[0]; None: tokens
    start the scope. Each key names all tokens up to and including its page. Raises ValueError, TypeError.
    """
    return _core.chain_keys(namespace, scope, tokens, page_size, previous)


def wrap_hashes(scheme: str, namespace: bytes, scope: bytes, hashes: U8) -> Keys:
    """Page keys from an engine's own chained hashes, [n, bytes of one hash] -> [n, 32].

    Raises ValueError, naming the accepted schemes, for a scheme that is not collision resistant: whoever can make two
    prompts collide could read another's KV.
    """
    return _core.wrap_hashes(scheme, namespace, scope, hashes)


def hashes_from_hex(texts: Sequence[str]) -> U8:
    """An engine's hashes from the 64 hexadecimal digits it writes each with, [n, 32].

    Holds the GIL. ValueError, TypeError: the first of `texts` that is none, with its index.
    """
    return _core.hashes_from_hex(texts if type(texts) is list else list(texts))


def object_ids(keys: Keys, pool: int = 0, rank: int = 0) -> ObjectIds:
    """Names of the stored objects of these pages, [n, 36]: key ‖ pool u16 ‖ rank u16, little-endian."""
    return _core.object_ids(keys, pool, rank)


def encode_headers(ids: ObjectIds, namespace: bytes, addresses: U64, payload_bytes: int, header_bytes: int) -> U8:
    """Headers of n pages to be stored, [n, header_bytes]. Reads each page once, for its checksum.

    ids [n, 36]; addresses [n]: where each page's `payload_bytes` bytes lie; header_bytes: 128 or 4096.
    """
    return _core.encode_headers(ids, namespace, addresses, payload_bytes, header_bytes)


def check_pages(headers: U8, ids: ObjectIds, namespace: bytes, addresses: U64, payload_bytes: int) -> U8:
    """Judges stored pages that were read: [n] of PageCheck, in the order a defect would be met from the outside in.

    headers [n, 128 or 4096] as read; ids [n, 36] as asked for; addresses [n]: where each payload was read to. The
    length of the whole object is the reader's to compare; here the header's lengths are, with payload_bytes.
    """
    return _core.check_pages(headers, ids, namespace, addresses, payload_bytes)


def header_claims(headers: U8) -> tuple[U8, U64]:
    """What n headers [n, 128 or 4096] say of their pages, unchecked: namespace digests [n, 32] and raw lengths [n]."""
    return _core.header_claims(headers)


def encode_encoded_headers(
    ids: ObjectIds,
    namespace: bytes,
    addresses: U64,
    stored_bytes: U64,
    codecs: U32,
    raw_bytes: int,
    header_bytes: int,
) -> U8:
    """`encode_headers` for pages that a codec made into `stored_bytes` [n] bytes at `addresses`.

    codecs [n]: what goes into each header; raw_bytes: the length of every page before.
    """
    return _core.encode_encoded_headers(ids, namespace, addresses, stored_bytes, codecs, raw_bytes, header_bytes)


def check_encoded(
    headers: U8, ids: ObjectIds, namespace: bytes, addresses: U64, available_bytes: U64, raw_bytes: int
) -> tuple[U8, U32, U64]:
    """`check_pages` for pages of any codec: [n] of PageCheck, codec, and stored length (0 where not OK).

    available_bytes [n]: how many bytes may be read at each address; a page that claims more is WRONG_LENGTH.
    """
    return _core.check_encoded(headers, ids, namespace, addresses, available_bytes, raw_bytes)


def split_planes(addresses: U64, page_bytes: int, value_bytes: int) -> U8:
    """Pages as byte planes, [n, page_bytes]: the first byte of every value of 1, 2 or 4 bytes, then the second, ...

    Bytes past the last whole value follow unchanged.
    """
    return _core.split_planes(addresses, page_bytes, value_bytes)


def join_planes(planes: U64, page_bytes: int, value_bytes: int, addresses: U64) -> None:
    """The reverse: `planes` [n] says where each page's planes lie, `addresses` [n] where the page goes."""
    _core.join_planes(planes, page_bytes, value_bytes, addresses)


def xxh3_128(addresses: U64, lengths: U64) -> U8:
    """XXH3-128 checksums of n byte ranges, [n, 16], in canonical order: the bytes of xxhash.xxh3_128_digest."""
    return _core.xxh3_128(addresses, lengths)
