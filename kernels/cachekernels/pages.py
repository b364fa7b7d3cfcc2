"""Pages as the outside world knows them: their keys, their object ids, and the header each is stored with.

Every function is pure, takes whole batches, releases the GIL and may run in any thread.
"""

from __future__ import annotations

from cachekernels import _core
from cachekernels.arrays import U8, U32, Keys


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
