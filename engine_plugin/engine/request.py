"""One generation request: what was asked, how far it is, and how it ended. No cache, no model, no text here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from engine_plugin.hicache.base import NO_SCOPE, CachedTokens, CacheHandle

U32 = NDArray[np.uint32]


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to choose tokens and when to stop. Values are checked where they come in, not here.

    `temperature` 0 is greedy; `top_k` -1 keeps the whole vocabulary; `seed` None draws one per request.
    """

    max_new_tokens: int = 128
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    stop: tuple[str, ...] = ()
    stop_token_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    seed: int | None = None


@dataclass(frozen=True, slots=True)
class FinishReason:
    """Why a request ended, in SGLang's words: type stop (matched: token id or string), length, abort (message)."""

    type: str
    matched: int | str | None = None
    length: int | None = None
    message: str | None = None
    status_code: int | None = None

    def as_json(self) -> dict[str, object]:
        """The object that goes into `meta_info.finish_reason`: type and whatever is known."""
        fields = {
            "matched": self.matched,
            "length": self.length,
            "message": self.message,
            "status_code": self.status_code,
        }
        return {"type": self.type, **{name: value for name, value in fields.items() if value is not None}}


@dataclass(frozen=True, slots=True)
class Progress:
    """What one step did to one request: tokens and text since the last Progress; `finish` once, in the last.

    `since_last_token_s`: from the output token before to the new ones, None for the first and without new ones.
    """

    request: Request
    new_token_ids: tuple[int, ...]
    new_text: str
    finish: FinishReason | None
    since_last_token_s: float | None = None


class OutputText(Protocol):
    """Turns output tokens into text as they come and looks for stop strings. One per request."""

    def push(self, token_id: int) -> str | None:
        """Take one token; the stop string that is complete now, if any."""

    def take(self, *, final: bool) -> str:
        """Text that became certain since the last call; with `final` also what was held back."""


@dataclass(slots=True)
class RequestTimes:
    """Moments of the injected monotonic clock, seconds; None: not yet."""

    arrived_s: float
    admitted_s: float | None = None
    first_token_s: float | None = None
    last_token_s: float | None = None
    finished_s: float | None = None

    @property
    def queue_s(self) -> float | None:
        """From arrival to the first admission."""
        return None if self.admitted_s is None else self.admitted_s - self.arrived_s

    @property
    def first_token_latency_s(self) -> float | None:
        """From arrival to the first output token."""
        return None if self.first_token_s is None else self.first_token_s - self.arrived_s

    def generated(self, now_s: float) -> float | None:
        """An output token is there. Returns the seconds since the one before, None for the first."""
        since_s = None if self.last_token_s is None else now_s - self.last_token_s
        self.last_token_s = now_s
        if self.first_token_s is None:
            self.first_token_s = now_s
        return since_s

    @property
    def end_to_end_s(self) -> float | None:
        """From arrival to the end."""
        return None if self.finished_s is None else self.finished_s - self.arrived_s


class Request:
    """A request inside the engine. Once submitted it belongs to the engine's thread, until its `finish` was reported.

    `request_id` grows with arrival: it is the fcfs order. Tokens live in one array, prompt first, so that slices are
    views.
    """

    def __init__(
        self,
        rid: str,
        request_id: int,
        prompt: U32,
        params: SamplingParams,
        text: OutputText,
        *,
        arrived_s: float,
        scope: bytes = NO_SCOPE,
    ) -> None:
        self.rid = rid
        self.request_id = request_id
        self.params = params
        self.scope = scope
        self.text = text
        self.prompt_length = len(prompt)
        self.times = RequestTimes(arrived_s)
        self.cached = CachedTokens()
        self.handle: CacheHandle | None = None
        self.num_computed = 0  # tokens [0, num_computed) have their KV in the pool
        self.num_retractions = 0
        self.num_load_failures = 0
        self.max_cached_tokens = len(prompt)  # lowered when a load failed
        self.finish: FinishReason | None = None
        self._tokens = np.empty(len(prompt) + params.max_new_tokens, np.uint32)
        self._tokens[: len(prompt)] = prompt
        self.num_tokens = len(prompt)

    @property
    def tokens(self) -> U32:
        """All tokens so far, prompt then output: a view, valid until the next `append`."""
        return self._tokens[: self.num_tokens]

    @property
    def output_ids(self) -> list[int]:
        """Output tokens so far, the one that stopped it included."""
        return [int(token) for token in self._tokens[self.prompt_length : self.num_tokens]]

    @property
    def num_output_tokens(self) -> int:
        """Tokens generated so far."""
        return self.num_tokens - self.prompt_length

    @property
    def num_remaining_tokens(self) -> int:
        """Tokens that may still be generated."""
        return self.params.max_new_tokens - self.num_output_tokens

    @property
    def is_prefilling(self) -> bool:
        """More than the newest token is still to be computed, or nothing was generated yet."""
        return self.num_output_tokens == 0 or self.num_tokens - self.num_computed > 1

    def append(self, token_id: int) -> None:
        """Take a generated token. Raises IndexError beyond max_new_tokens."""
        self._tokens[self.num_tokens] = token_id
        self.num_tokens += 1
