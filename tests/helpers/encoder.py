"""A tokenizer without a model: one token a UTF-8 byte, roles as control tokens. Prefix-stable, so growth is exact."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from engine_plugin.demo.recordings import Message

U32 = NDArray[np.uint32]
_ROLES = {"system": 0, "user": 1, "assistant": 2, "tool": 3}
_END = 4
_FIRST_BYTE = 5


@dataclass(frozen=True)
class ByteEncoder:
    """`bytes_per_token` > 1 makes prompts shorter: only every so many-th byte becomes a token."""

    vocab_size: int = 512
    bytes_per_token: int = 1

    def encode_chat(self, messages: Sequence[Message]) -> U32:
        """Token ids [n] of the conversation up to where the assistant begins to speak."""
        tokens: list[int] = []
        for message in messages:
            content = message.content.encode()[:: self.bytes_per_token]
            tokens += [_ROLES[message.role], *(_FIRST_BYTE + byte for byte in content), _END]
        return np.asarray([*tokens, _ROLES["assistant"]], np.uint32)
