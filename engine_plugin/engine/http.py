"""The server's routes, SGLang's shape: /generate with streaming, health, metrics, flush, information, aborts.

DESIGN. Handlers parse, start generations, and turn what they bring into JSON; nothing here knows the scheduler.
Whatever way a handler ends (answered, client gone, cancelled at shutdown), generations that are not finished are
abandoned, so that nobody computes for a client that left. Wrong requests get 400 and what was expected.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from engine_plugin.engine.json_fields import BadRequest, Fields, parse_json
from engine_plugin.engine.loop import EngineStopped
from engine_plugin.engine.protocol import Prompt, Task, parse_generate
from engine_plugin.engine.request import SamplingParams
from engine_plugin.engine.service import EngineService, Generation, Overloaded

MAX_BODY_BYTES = 16 << 20
MAX_DISCARDED_BYTES = 64 << 20
"""So much of a body that is too large is read and thrown away, so that the client gets to read the answer."""

STALLED_S = 300.0
"""A step that takes longer counts as an engine that hangs."""

MAX_FLUSH_WAIT_S = 600.0
CLIENT_CLOSED_REQUEST = 499


@dataclass(frozen=True, slots=True)
class ServerInfo:
    """What the server says about itself. `settings`: the effective flags; `has_metrics`: /metrics is on."""

    model_path: str
    served_model_name: str
    settings: Mapping[str, object]
    has_metrics: bool
    has_cache_report: bool


class JsonResponse(Response):
    """JSON in ASCII: a lone surrogate in a client's rid must not fail the answer."""

    media_type = "application/json"

    def render(self, content: object) -> bytes:
        """The body."""
        return json.dumps(content).encode()


class EventStream(StreamingResponse):
    """Server-sent events of JSON values, closed by [DONE]. Abandons the generations when it ends in any way."""

    def __init__(self, generations: Sequence[Generation], events: AsyncGenerator[object, None]) -> None:
        super().__init__(self._lines(events), media_type="text/event-stream")
        self._generations = generations

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send it. The iterator may never be started if the client is gone already, hence the finally here."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            abandon_all(self._generations)

    async def _lines(self, events: AsyncGenerator[object, None]) -> AsyncIterator[bytes]:
        async with aclosing(events):
            async for event in events:
                yield b"data: " + json.dumps(event).encode() + b"\n\n"
            yield b"data: [DONE]\n\n"


class Routes:
    """The handlers of SGLang's own endpoints."""

    def __init__(self, service: EngineService, info: ServerInfo) -> None:
        self._service = service
        self._info = info

    def routes(self) -> list[Route]:
        """All of them."""
        return [
            Route("/generate", self.generate, methods=["POST"]),
            Route("/health", self.health, methods=["GET"]),
            Route("/health_generate", self.health_generate, methods=["GET"]),
            Route("/metrics", self.metrics, methods=["GET"]),
            Route("/flush_cache", self.flush_cache, methods=["GET", "POST"]),
            Route("/get_model_info", self.model_info, methods=["GET"]),
            Route("/model_info", self.model_info, methods=["GET"]),
            Route("/server_info", self.server_info, methods=["GET"]),
            Route("/get_server_info", self.server_info, methods=["GET"]),
            Route("/abort_request", self.abort_request, methods=["POST"]),
        ]

    async def generate(self, request: Request) -> Response:
        """One prompt or a batch; `stream` gives server-sent events, the text and ids of each being all so far."""
        call = parse_generate(parse_json(await read_body(request)))
        generations = await self._service.start(call.tasks)
        if call.stream:
            return EventStream(generations, _generate_events(generations, is_batch=call.is_batch))
        await all_complete(request, generations)
        if not call.is_batch:
            refuse_if_failed(generations[0])
            return JsonResponse(generations[0].as_json())
        return JsonResponse([generation.as_json() for generation in generations])

    async def health(self, request: Request) -> Response:
        """200 while the engine's thread makes progress."""
        engine = self._service.engine
        if not engine.is_alive:
            return error_response(503, "the engine has stopped")
        stalled_s = engine.stalled_s()
        if stalled_s > STALLED_S:
            return error_response(503, f"the engine has been in one step for {stalled_s:.0f} s")
        return Response(status_code=200)

    async def health_generate(self, request: Request) -> Response:
        """200 after one token was generated."""
        prompt = Prompt(None, self._service.probe_prompt())
        task = Task(None, prompt, SamplingParams(max_new_tokens=1, temperature=0.0), 1)
        generations = await self._service.start([task])
        await all_complete(request, generations)
        refuse_if_failed(generations[0])
        return Response(status_code=200)

    async def metrics(self, request: Request) -> Response:
        """Prometheus text. Answered without waiting for the engine."""
        if not self._info.has_metrics:
            return error_response(404, "metrics are off: start the server with --enable-metrics")
        text = self._service.metrics.text(self._service.engine.counters)
        return PlainTextResponse(text, media_type="text/plain; version=0.0.4")

    async def flush_cache(self, request: Request) -> Response:
        """Empty the device and host tiers, waiting up to `timeout` seconds until nothing stands in the way."""
        timeout_s = _timeout(request.query_params.get("timeout", "0"))
        result = await asyncio.wrap_future(self._service.engine.flush(timeout_s))
        if result.ok:
            return PlainTextResponse("Cache flushed: device and host tiers are empty, storage is kept.\n")
        pending = ", ".join(f"{count} {name}" for name, count in result.pending.items())
        return PlainTextResponse(f"Cache not flushed: still pending: {pending}.\n", status_code=400)

    async def model_info(self, request: Request) -> Response:
        """Which model is served."""
        return JsonResponse(
            {
                "model_path": self._info.model_path,
                "served_model_name": self._info.served_model_name,
                "is_generation": True,
                "vocab_size": self._service.vocabulary.size,
                "max_total_num_tokens": self._service.limits.pool_tokens,
                "context_length": self._service.limits.context_tokens,
            }
        )

    async def server_info(self, request: Request) -> Response:
        """The effective settings and the engine's counters."""
        state = await asyncio.wrap_future(self._service.engine.ask(lambda scheduler: scheduler.counters()))
        return JsonResponse({**self._info.settings, "internal_states": [state]})

    async def abort_request(self, request: Request) -> Response:
        """End the request `rid`, or all with `abort_all`. 200 also when there is none: it may have just ended."""
        raw = Fields(parse_json(await read_body(request)))
        raw.only({"rid", "abort_all"}, {"abort_message": ()})
        rid, abort_all = raw.string("rid"), raw.boolean("abort_all", False)
        if (rid is None) != abort_all:
            raise BadRequest("either rid (a string) or abort_all: true is expected")
        self._service.abort(None if abort_all else rid)
        return Response(status_code=200)


def build_app(service: EngineService, info: ServerInfo, more_routes: Sequence[Route] = ()) -> Starlette:
    """The application; `service` must be connected before the first request."""
    return Starlette(
        routes=[*Routes(service, info).routes(), *more_routes],
        exception_handlers={
            BadRequest: lambda request, error: error_response(400, str(error)),
            Overloaded: lambda request, error: error_response(503, str(error)),
            EngineStopped: lambda request, error: error_response(503, str(error)),
            ClientDisconnect: lambda request, error: Response(status_code=CLIENT_CLOSED_REQUEST),
            HTTPException: _http_error,
            500: lambda request, error: error_response(500, "internal error: see the server's log"),
        },
    )


def error_response(status_code: int, message: str) -> Response:
    """An error in the shape that both SGLang's and OpenAI's clients read."""
    kind = "invalid_request_error" if status_code < 500 else "server_error"
    return JsonResponse({"error": {"message": message, "type": kind, "code": status_code}}, status_code=status_code)


def refuse_if_failed(generation: Generation) -> None:
    """Raise what a single answer that the engine gave up on is answered with."""
    finish = generation.finish
    if finish is not None and finish.status_code is not None:
        raise HTTPException(finish.status_code, finish.message)


async def read_body(request: Request) -> bytes:
    """The body, bounded. Raises BadRequest, ClientDisconnect."""
    body = bytearray()
    num_discarded = 0
    async for chunk in request.stream():
        if len(body) + len(chunk) <= MAX_BODY_BYTES and not num_discarded:
            body += chunk
            continue
        num_discarded += len(chunk)
        if num_discarded > MAX_DISCARDED_BYTES:
            break
    if num_discarded:
        raise BadRequest(f"the body has more than {MAX_BODY_BYTES} bytes, which is the most that is taken")
    return bytes(body)


async def all_complete(request: Request, generations: Sequence[Generation]) -> None:
    """Wait for the end of all of them. Raises ClientDisconnect as soon as the client is gone."""
    done = asyncio.ensure_future(asyncio.gather(*(generation.complete() for generation in generations)))
    gone = asyncio.ensure_future(_disconnected(request))
    either: list[asyncio.Future[Any]] = [done, gone]
    try:
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if not done.done():
            raise ClientDisconnect
        await done
    finally:
        done.cancel()
        gone.cancel()
        abandon_all(generations)


def abandon_all(generations: Sequence[Generation]) -> None:
    """Nobody waits for these any more. Harmless for those that ended, and once the engine has stopped."""
    with suppress(EngineStopped):
        for generation in generations:
            generation.abandon()


async def merged(generations: Sequence[Generation]) -> AsyncGenerator[tuple[int, Generation], None]:
    """(index, generation) after each advance of any of them, until all have ended."""
    pending = {asyncio.create_task(generation.advance()): number for number, generation in enumerate(generations)}
    try:
        while pending:
            done, _ = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
            for task in sorted(done, key=pending.__getitem__):
                number = pending.pop(task)
                await task
                generation = generations[number]
                if generation.finish is None:
                    pending[asyncio.create_task(generation.advance())] = number
                yield number, generation
    finally:
        for task in pending:
            task.cancel()


async def _generate_events(generations: Sequence[Generation], *, is_batch: bool) -> AsyncGenerator[object, None]:
    async with aclosing(merged(generations)) as updates:
        async for number, generation in updates:
            answer = generation.as_json()
            yield {"index": number, **answer} if is_batch else answer


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _timeout(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value <= MAX_FLUSH_WAIT_S:
        raise BadRequest(f"timeout must be seconds in [0, {MAX_FLUSH_WAIT_S:.0f}], got {text!r}")
    return value


def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return error_response(error.status_code, error.detail)
