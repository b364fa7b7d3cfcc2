"""Anonymised traces: prompts known only as chained block hashes, played as synthetic tokens of the same structure.

A block's tokens are a function of (trace, hash id), so two prompts share tokens exactly as far as they share hash ids.
Ids are chained (an id names everything before it too), which makes a trace without text a faithful prefix workload.
"""

import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from engine_plugin.demo.recordings import U32, Encoder, Recording

U64 = NDArray[np.uint64]

_FIRST_TOKEN = 256  # below lie the control tokens of common vocabularies (end of text, roles)


@dataclass(frozen=True)
class BlockPrompt:
    """One prompt: `hash_ids` int64 [ceil or floor(num_tokens / block_tokens)], and its length in tokens."""

    hash_ids: NDArray[np.int64]
    num_tokens: int


class BlockRecording(Recording):
    """A session of block-hash prompts.

    `salt` tells traces apart whose hash ids are local to their file. Tokens past the last hashed block (where a trace
    has floor(n / block) ids) are this prompt's own: nothing says that another prompt shares them.
    """

    def __init__(self, name: str, prompts: Sequence[BlockPrompt], block_tokens: int, salt: str) -> None:
        super().__init__(name)
        self.prompts = tuple(prompts)
        self.block_tokens = block_tokens
        self._salt = zlib.crc32(salt.encode())

    @property
    def num_turns(self) -> int:
        return len(self.prompts)

    @property
    def max_shrink(self) -> int:
        return self.block_tokens

    def tokens(self, turn: int, encoder: Encoder, shrink: int = 1) -> U32:
        if not 1 <= shrink <= self.block_tokens:
            raise ValueError(f"shrink must be in [1, {self.block_tokens}] for session {self.name!r}, got {shrink}")
        prompt = self.prompts[turn]
        block_tokens = self.block_tokens // shrink
        num_tokens = max(1, prompt.num_tokens // shrink)
        hashed = synthetic_blocks(prompt.hash_ids, block_tokens, self._salt, encoder.vocab_size).reshape(-1)[
            :num_tokens
        ]
        if num_tokens == len(hashed):
            return hashed
        own_id = np.asarray([-1 - zlib.crc32(f"{self.name}/{turn}".encode())], np.int64)
        return np.concatenate(
            [hashed, synthetic_blocks(own_id, num_tokens - len(hashed), self._salt, encoder.vocab_size)[0]]
        )


def synthetic_blocks(hash_ids: NDArray[np.int64], block_tokens: int, salt: int, vocab_size: int) -> U32:
    """Token ids [len(hash_ids), block_tokens]: equal ids, equal rows; a shorter block is a prefix of a longer one."""
    first = min(_FIRST_TOKEN, vocab_size // 2)
    seeds = _mix(hash_ids.astype(np.uint64) + (np.uint64(salt) << np.uint64(32)))
    words = _mix(seeds[:, None] + np.arange(1, block_tokens + 1, dtype=np.uint64)[None, :])
    return (first + words % np.uint64(vocab_size - first)).astype(np.uint32)


def _mix(values: U64) -> U64:
    """The finaliser of splitmix64 (Steele, Lea, Flood 2014), element by element."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
