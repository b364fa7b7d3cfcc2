"""Between the web server's event loop and the engine's thread: prompts in, tokens and text out.

DESIGN. A task becomes a `Generation`: its prompt is tokenized off the event loop, checked against the limits, and
submitted. What the engine reports arrives through `deliver` on the engine's thread and is handed over in one
call per step. A generation that nobody reads any more is abandoned: the engine ends it before it computes anything
new. Everything but `deliver` belongs to the event loop.
"""

from __future__ import annotations

import asyncio
import itertools
import uuid
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from engine_plugin.engine.detokenizer import CONTEXT_TOKENS, NoText, TextStream
from engine_plugin.engine.json_fields import BadRequest
from engine_plugin.engine.loop import EngineLoop, EngineStopped
from engine_plugin.engine.metrics import EngineMetrics
from engine_plugin.engine.protocol import Prompt, Task
from engine_plugin.engine.request import FinishReason, OutputText, Progress, Request, SamplingParams
from engine_plugin.engine.scheduler import Limits

U32 = NDArray[np.uint32]


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """One message of a conversation."""

    role: str
    content: str


class TextCodec(Protocol):
    """What is asked of a tokenizer."""

    def encode(self, text: str) -> U32:
        """Token ids [n] of a prompt."""

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """Text of any run of ids; incomplete characters come out as U+FFFD."""

    def encode_chat(self, messages: Sequence[ChatMessage]) -> U32:
        """Token ids [n] of a conversation, up to where the assistant answers. Raises ValueError."""


class Overloaded(RuntimeError):
    """More waiting requests than the server was told to keep."""


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """`size`: ids are in [0, size). `codec` None: the model has no tokenizer, only ids go in and out."""

    size: int
    codec: TextCodec | None


class Generation:
    """One request as its reader sees it. `output_ids`, `text` and `finish` are what was read so far."""

    def __init__(self, request: Request, abandon: Callable[[Request], None]) -> None:
        self.request = request
        self.output_ids: list[int] = []
        self.text = ""
        self.finish: FinishReason | None = None
        self._abandon = abandon
        self._arrived: asyncio.Queue[Progress] = asyncio.Queue()

    def put(self, progress: Progress) -> None:
        """Hand over what happened; it waits until somebody reads."""
        self._arrived.put_nowait(progress)

    async def advance(self) -> None:
        """Wait for news and take in all there is."""
        self._take(await self._arrived.get())
        while not self._arrived.empty():
            self._take(self._arrived.get_nowait())

    async def complete(self) -> Generation:
        """Itself, at the end."""
        while self.finish is None:
            await self.advance()
        return self

    def abandon(self) -> None:
        """Nobody reads this any more; harmless when it has ended."""
        if self.finish is None:
            self._abandon(self.request)

    def meta_info(self) -> dict[str, object]:
        """SGLang's `meta_info`. Times in seconds; those not known yet are null."""
        request = self.request
        return {
            "id": request.rid,
            "finish_reason": None if self.finish is None else self.finish.as_json(),
            "prompt_tokens": request.prompt_length,
            "completion_tokens": len(self.output_ids),
            "cached_tokens": request.cached.total,
            "cached_tokens_details": request.cached.by_source(),
            "queue_time": request.times.queue_s,
            "time_to_first_token": request.times.first_token_latency_s,
            "e2e_latency": request.times.end_to_end_s,
            "num_retractions": request.num_retractions,
        }

    def as_json(self) -> dict[str, object]:
        """The answer so far, in the shape of /generate."""
        return {"text": self.text, "output_ids": self.output_ids, "meta_info": self.meta_info()}

    def _take(self, progress: Progress) -> None:
        self.output_ids.extend(progress.new_token_ids)
        self.text += progress.new_text
        self.finish = progress.finish


class EngineService:
    """Starts generations on an engine. `connect` before use, on the event loop that will serve."""

    def __init__(
        self,
        vocabulary: Vocabulary,
        limits: Limits,
        *,
        clock: Callable[[], float],
        max_queued: int | None = None,
    ) -> None:
        self.limits = limits
        self.vocabulary = vocabulary
        self.metrics = EngineMetrics()
        self.engine: EngineLoop
        self._clock = clock
        self._max_queued = max_queued
        self._numbers = itertools.count()
        self._generations: dict[int, Generation] = {}
        self._rids: set[str] = set()
        self._event_loop: asyncio.AbstractEventLoop

    def connect(self, engine: EngineLoop, event_loop: asyncio.AbstractEventLoop) -> None:
        """Name the engine that runs the requests and the event loop that reads the answers."""
        self.engine, self._event_loop = engine, event_loop

    async def start(self, tasks: Sequence[Task]) -> list[Generation]:
        """Submit all of the tasks, or none. Raises BadRequest, Overloaded, EngineStopped."""
        if self._max_queued is not None and self.num_waiting + len(tasks) > self._max_queued:
            raise Overloaded(f"the queue is full: {self.num_waiting} requests wait, at most {self._max_queued} may")
        arrived_s = self._clock()
        encoded = [await self._encode(task.prompt) for task in tasks]
        requests = [self._request(task, ids, arrived_s) for task, ids in zip(tasks, encoded, strict=True)]
        self._claim([request.rid for request in requests])
        return [self._submit(request) for request in requests]

    @property
    def num_waiting(self) -> int:
        """Requests under way that the engine does not compute yet."""
        return len(self._generations) - self.engine.num_running

    def abort(self, rid: str | None) -> None:
        """End the request of that id, or every one."""
        self.engine.abort(lambda request: rid is None or request.rid == rid, "aborted by the client")

    def end_all(self, message: str) -> None:
        """End every request; their clients get status 503 or, in a stream, an abort with the message."""
        with suppress(EngineStopped):
            self.engine.abort(lambda request: True, message, 503)

    async def chat_prompt(self, messages: Sequence[ChatMessage]) -> Prompt:
        """The tokens of a conversation. Raises BadRequest for one that the model's template refuses."""
        codec = self.vocabulary.codec
        if codec is None:
            raise BadRequest("messages need a tokenizer, which this model has not: use /generate with input_ids")
        for message in messages:
            _check_unicode(message.role + message.content, "messages")
        try:
            return Prompt(None, await asyncio.to_thread(codec.encode_chat, messages))
        except ValueError as error:
            raise BadRequest(f"messages: {error}") from error

    def probe_prompt(self) -> U32:
        """A prompt that any model can continue: one token."""
        return np.zeros(1, np.uint32)

    def deliver(self, progress: list[Progress]) -> None:
        """Called on the engine's thread."""
        self._event_loop.call_soon_threadsafe(self._dispatch, progress)

    def _dispatch(self, progress: list[Progress]) -> None:
        for one in progress:
            self._generations[one.request.request_id].put(one)
            self.metrics.progressed(one)
            if one.finish is not None:
                self._forget(one.request)
                self.metrics.finished(one.request)

    def _submit(self, request: Request) -> Generation:
        generation = Generation(request, self._abandon)
        self._generations[request.request_id] = generation
        try:
            self.engine.submit(request)
        except BaseException:
            self._forget(request)
            raise
        return generation

    def _abandon(self, request: Request) -> None:
        if request.request_id in self._generations:
            self.engine.abort(lambda other: other is request, "the client went away")

    def _forget(self, request: Request) -> None:
        del self._generations[request.request_id]
        self._rids.discard(request.rid)

    def _claim(self, rids: Sequence[str]) -> None:
        for number, rid in enumerate(rids):
            if rid in self._rids or rid in rids[:number]:
                raise BadRequest(f"rid {rid!r} is in use: ids of requests under way must differ")
        self._rids.update(rids)

    async def _encode(self, prompt: Prompt) -> U32:
        if prompt.ids is not None:
            return prompt.ids
        text = prompt.text or ""
        if self.vocabulary.codec is None:
            raise BadRequest("text needs a tokenizer, which this model has not: send input_ids")
        _check_unicode(text, "text")
        # Off the event loop: a megabyte of text takes longer than anybody else should wait.
        return await asyncio.to_thread(self.vocabulary.codec.encode, text)

    def _request(self, task: Task, ids: U32, arrived_s: float) -> Request:
        self._check_prompt(ids)
        params = self._fitted(task, len(ids))
        rid = task.rid if task.rid is not None else uuid.uuid4().hex
        return Request(
            rid, next(self._numbers), ids, params, self._text(params, ids), arrived_s=arrived_s, scope=task.scope
        )

    def _check_prompt(self, ids: NDArray[np.uint32]) -> None:
        if len(ids) == 0:
            raise BadRequest("the prompt is empty: at least one token is expected")
        most = self.limits.max_request_tokens - 1
        if len(ids) > most:
            raise BadRequest(f"the prompt has {len(ids)} tokens: at most {most} fit (context or KV pool), and one more")
        worst = int(ids.max())
        if worst >= self.vocabulary.size:
            raise BadRequest(f"token id {worst} is out of range: ids are in [0, {self.vocabulary.size})")

    def _fitted(self, task: Task, prompt_length: int) -> SamplingParams:
        room = self.limits.max_request_tokens - prompt_length
        if task.max_new_tokens is None:
            return replace(task.params, max_new_tokens=min(task.params.max_new_tokens, room))
        if task.max_new_tokens > room:
            raise BadRequest(
                f"max_new_tokens is {task.max_new_tokens}, but after a prompt of {prompt_length} tokens at most "
                f"{room} fit into {self.limits.max_request_tokens} (context or KV pool)"
            )
        return task.params

    def _text(self, params: SamplingParams, ids: NDArray[np.uint32]) -> OutputText:
        codec = self.vocabulary.codec
        if codec is None:
            return NoText()

        def decode(output: Sequence[int]) -> str:
            return codec.decode(output, skip_special_tokens=params.skip_special_tokens)

        return TextStream(decode, ids[-CONTEXT_TOKENS:].tolist(), params.stop)


def _check_unicode(text: str, what: str) -> None:
    """JSON can hold halves of characters, tokenizers cannot."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise BadRequest(f"{what} is not Unicode: {error.reason} at character {error.start}") from None
