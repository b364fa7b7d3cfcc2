"""Page keys straight from their definition, with hashlib."""

import hashlib
from collections.abc import Iterable, Sequence


def pack_tokens(tokens: Iterable[int]) -> bytes:
    return b"".join(int(token).to_bytes(4, "little") for token in tokens)


def root_key(namespace: bytes, scope: bytes, tokens: Iterable[int]) -> bytes:
    return hashlib.sha256(b"cs1/root" + namespace + scope + pack_tokens(tokens)).digest()


def next_key(previous: bytes, tokens: Iterable[int]) -> bytes:
    return hashlib.sha256(b"cs1/next" + previous + pack_tokens(tokens)).digest()


def chain_keys(
    namespace: bytes, scope: bytes, tokens: Sequence[int], page_size: int, previous: bytes | None = None
) -> list[bytes]:
    """One key per whole page of `tokens`."""
    keys: list[bytes] = []
    for start in range(0, len(tokens) - page_size + 1, page_size):
        page = tokens[start : start + page_size]
        previous = root_key(namespace, scope, page) if previous is None else next_key(previous, page)
        keys.append(previous)
    return keys


def wrap_hash(scheme: str, namespace: bytes, scope: bytes, engine_hash: bytes) -> bytes:
    name = scheme.encode()
    return hashlib.sha256(
        b"cs1/wrap" + len(name).to_bytes(4, "little") + name + namespace + scope + engine_hash
    ).digest()
