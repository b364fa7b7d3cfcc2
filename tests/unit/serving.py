"""The whole server but its model, its socket and its process: an ASGI application over an engine thread."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx
import numpy as np
from numpy.typing import NDArray
from starlette.applications import Starlette

from engine_plugin.engine.batch import ForwardBatch
from engine_plugin.engine.http import ServerInfo, build_app
from engine_plugin.engine.loop import EngineLoop
from engine_plugin.engine.metrics import add_engine_gauges
from engine_plugin.engine.openai import OpenAIRoutes
from engine_plugin.engine.request import Request
from engine_plugin.engine.scheduler import Limits, Scheduler
from engine_plugin.engine.service import ChatMessage, EngineService, Vocabulary
from engine_plugin.hicache.no_cache import NoCache
from tests.oracles.token_model import VOCAB, TokenModel, new_planes


class Letters:
    """A tokenizer in which each character is a token, and each token a letter."""

    def encode(self, text: str) -> NDArray[np.uint32]:
        return np.array([ord(character) % VOCAB for character in text], np.uint32)

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        return "".join(chr(ord("a") + token % 26) for token in ids)

    def encode_chat(self, messages: Sequence[ChatMessage]) -> NDArray[np.uint32]:
        if messages[-1].role == "assistant":
            raise ValueError("the last message must not be the assistant's")
        return self.encode("".join(f"<{message.role}>{message.content}" for message in messages))


LETTERS = Letters()
PROMPT = [5, 6, 7, 8, 9, 10]


class HeldModel(TokenModel):
    """Computes only while it is let: a test can look at a server in the middle of a request."""

    def __init__(self, num_pages: int, page_size: int) -> None:
        super().__init__(new_planes(num_pages * page_size), page_size)
        self.may_run = threading.Event()
        self.may_run.set()
        self.has_begun = threading.Event()
        self.fail_with: Exception | None = None
        self.pause_after: int | None = None  # forwards
        self.paused = threading.Event()

    def next_tokens(self, batch: ForwardBatch, rows: Sequence[int], requests: Sequence[Request]) -> list[int]:
        self.has_begun.set()
        assert self.may_run.wait(60), "the test never let the model run"
        if self.fail_with is not None:
            error, self.fail_with = self.fail_with, None
            raise error
        if self.pause_after is not None and len(self.batches) + 1 >= self.pause_after:
            self.may_run.clear()
            self.pause_after = None
            self.paused.set()
        return super().next_tokens(batch, rows, requests)


@dataclass
class Server:
    """A running application and everything behind it."""

    app: Starlette
    client: httpx.AsyncClient
    service: EngineService
    engine: EngineLoop
    model: HeldModel
    cache: NoCache
    fatal: threading.Event = field(default_factory=threading.Event)

    async def post(self, path: str, body: object) -> httpx.Response:
        return await self.client.post(path, content=body if isinstance(body, bytes) else json.dumps(body))

    async def generate(self, **body: object) -> dict[str, object]:
        response = await self.post("/generate", body)
        assert response.status_code == 200, response.text
        answer: dict[str, object] = response.json()
        return answer

    async def refused(self, body: object, path: str = "/generate", status_code: int = 400) -> str:
        response = await self.post(path, body)
        assert response.status_code == status_code, response.text
        message: str = response.json()["error"]["message"]
        return message

    async def until(self, moved: threading.Event) -> None:
        assert await asyncio.to_thread(moved.wait, 60)

    async def settle(self) -> None:
        """Return when the engine has taken every command so far."""
        await asyncio.wrap_future(self.engine.ask(lambda scheduler: None))

    async def assert_nothing_held(self) -> None:
        flushed = await asyncio.wrap_future(self.engine.flush(60.0))
        assert flushed.ok, flushed.pending
        self.cache.check()
        counters = self.cache.counters()
        assert counters["device_pages_free"] == counters["device_pages"]


@asynccontextmanager
async def serving(
    *, num_pages: int = 64, page_size: int = 4, context_tokens: int = 100, with_text: bool = True, **options: object
) -> AsyncIterator[Server]:
    """`options`: max_running, chunk_tokens, max_queued, has_metrics, has_cache_report, clock."""
    clock = options.get("clock", time.monotonic)
    max_running, chunk_tokens = options.get("max_running", 8), options.get("chunk_tokens", 16)
    limits = Limits(max_running, chunk_tokens, num_pages * page_size, context_tokens)  # type: ignore[arg-type]
    cache, model = NoCache(num_pages, page_size), HeldModel(num_pages, page_size)
    scheduler = Scheduler(cache, model, limits, eos_token_ids=frozenset(), clock=clock)  # type: ignore[arg-type]
    service = EngineService(
        Vocabulary(VOCAB, Letters() if with_text else None),
        limits,
        clock=clock,  # type: ignore[arg-type]
        max_queued=options.get("max_queued"),  # type: ignore[arg-type]
    )
    fatal = threading.Event()
    engine = EngineLoop(scheduler, clock=clock, deliver=service.deliver, on_fatal=fatal.set)  # type: ignore[arg-type]
    info = ServerInfo(
        "/models/tiny.gguf",
        "tiny",
        {"page_size": page_size},
        has_metrics=bool(options.get("has_metrics", True)),
        has_cache_report=bool(options.get("has_cache_report", True)),
    )
    app = build_app(service, info, OpenAIRoutes(service, info, lambda: 1234.5).routes())
    add_engine_gauges(service.metrics, scheduler)
    service.connect(engine, asyncio.get_running_loop())
    engine.start()
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    try:
        async with httpx.AsyncClient(transport=transport, base_url="http://test", timeout=60) as client:
            yield Server(app, client, service, engine, model, cache, fatal)
    finally:
        model.may_run.set()
        if not fatal.is_set():
            await asyncio.to_thread(engine.stop, 1.0)


def run(test: Callable[[Server], Awaitable[None]], **options: Any) -> None:
    async def main() -> None:
        async with serving(**options) as server:
            await test(server)

    asyncio.run(main())


def text_of(ids: list[int]) -> str:
    return LETTERS.decode(ids, skip_special_tokens=True)


def events_of(body: str) -> list[object]:
    """The JSON values of a stream that ended as it should."""
    lines = [line for line in body.split("\n\n") if line]
    assert all(line.startswith("data: ") for line in lines)
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]
