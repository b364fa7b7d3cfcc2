"""What a recorded session is, whatever file it came from: a name and, turn by turn, the tokens of a whole prompt."""

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

U32 = NDArray[np.uint32]


@dataclass(frozen=True)
class Message:
    """One message of a conversation; `role` is system, user, assistant or tool."""

    role: str
    content: str


class Encoder(Protocol):
    """The model's tokenizer, as far as sessions need it."""

    @property
    def vocab_size(self) -> int:
        """Token ids lie in [0, vocab_size)."""

    def encode_chat(self, messages: Sequence[Message]) -> U32:
        """Token ids [n] of the conversation in the model's chat template, up to where the assistant begins to speak."""


class Recording(ABC):
    """A session read from a file. Every turn holds its whole prompt, as an agent sends it."""

    def __init__(self, name: str) -> None:
        self.name = name

    @property
    @abstractmethod
    def num_turns(self) -> int:
        """Number of prompts, at least 1."""

    @property
    @abstractmethod
    def max_shrink(self) -> int:
        """Greatest divisor `tokens` accepts for the prompt lengths; 1 where the tokens are real text."""

    @abstractmethod
    def tokens(self, turn: int, encoder: Encoder, shrink: int = 1) -> U32:
        """Token ids [n] of the whole prompt of `turn` (from 0), `shrink` times shorter; shared prefixes stay shared."""


class TextRecording(Recording):
    """A session with its text: `prompts[turn]` is the whole conversation up to the assistant's answer."""

    def __init__(self, name: str, prompts: Sequence[Sequence[Message]]) -> None:
        super().__init__(name)
        self.prompts = tuple(tuple(prompt) for prompt in prompts)

    @property
    def num_turns(self) -> int:
        return len(self.prompts)

    @property
    def max_shrink(self) -> int:
        return 1

    def tokens(self, turn: int, encoder: Encoder, shrink: int = 1) -> U32:
        if shrink != 1:
            raise ValueError(f"text of session {self.name!r} cannot be shrunk (asked: {shrink})")
        return encoder.encode_chat(self.prompts[turn])


@dataclass(frozen=True)
class Session:
    """What one agent sends: `prompts[turn]` is the whole prompt, uint32 [n]. Replies in it come from the script."""

    name: str
    prompts: tuple[U32, ...]


def working_set_tokens(sessions: Sequence[Session], page_size: int) -> int:
    """Tokens in distinct whole pages of all prompts: what a cache must hold to compute nothing twice."""
    pages = set()
    for session in sessions:
        for prompt in session.prompts:
            digest = hashlib.sha256()
            for begin in range(0, len(prompt) - page_size + 1, page_size):
                digest.update(prompt[begin : begin + page_size].tobytes())
                pages.add(digest.copy().digest())  # names the page and everything before it
    return len(pages) * page_size
