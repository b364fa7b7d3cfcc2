"""A client of one engine's HTTP interface: a streamed /generate with the time to its first token, and its counters."""

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPException, HTTPResponse
from typing import Any

from engine_plugin.demo.errors import EngineError
from engine_plugin.demo.recordings import U32
from engine_plugin.hicache.base import CachedTokens

_DATA = b"data:"
_DONE = b"[DONE]"


@dataclass(frozen=True)
class Generation:
    """One answer. `ttft_s`: from sending the request to its first token's arrival; `total_s`: to the stream's end."""

    output_ids: tuple[int, ...]
    prompt_tokens: int
    cached: CachedTokens
    ttft_s: float
    total_s: float


class EngineClient:
    """Speaks to the engine at host:port. Blocking; one request at a time; every read has `timeout_s`."""

    def __init__(
        self, host: str, port: int, *, timeout_s: float = 300.0, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._address = (host, port)
        self._timeout_s = timeout_s
        self._clock = clock

    def generate(self, prompt: U32, max_new_tokens: int) -> Generation:
        """Greedy answer of exactly max_new_tokens tokens to the prompt's token ids. Raises EngineError."""
        body = {
            "input_ids": prompt.tolist(),
            "sampling_params": {"max_new_tokens": max_new_tokens, "temperature": 0.0, "ignore_eos": True},
            "stream": True,
        }
        begin = self._clock()
        first: float | None = None
        last: dict[str, Any] = {}
        for event in self._stream("/generate", body):
            if "error" in event:
                raise EngineError(f"the engine broke off: {event['error']}")
            if first is None and event["output_ids"]:
                first = self._clock()
            last = event
        if first is None:
            raise EngineError("the engine ended the stream without a token")
        return _generation(last, first - begin, self._clock() - begin)

    def get_json(self, path: str) -> dict[str, Any]:
        """The JSON object at `path`. Raises EngineError."""
        with _connected(*self._address, self._timeout_s) as connection:
            answer: dict[str, Any] = json.loads(_request(connection, "GET", path, None).read())
        return answer

    def _stream(self, path: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """The server-sent events of a POST, each a JSON object, until [DONE]."""
        with _connected(*self._address, self._timeout_s) as connection:
            response = _request(connection, "POST", path, json.dumps(body).encode())
            while line := response.readline():
                if not line.startswith(_DATA):
                    continue
                data = line[len(_DATA) :].strip()
                if data == _DONE:
                    return
                yield json.loads(data)
        raise EngineError(f"{path}: the stream ended before {_DONE.decode()}")


@contextmanager
def _connected(host: str, port: int, timeout_s: float) -> Iterator[HTTPConnection]:
    """A connection whose failures are EngineErrors."""
    connection = HTTPConnection(host, port, timeout=timeout_s)
    try:
        yield connection
    except (OSError, HTTPException, ValueError) as error:  # ValueError: an answer that is not JSON
        raise EngineError(f"the engine at {host}:{port} failed: {type(error).__name__}: {error}") from error
    finally:
        connection.close()


def _request(connection: HTTPConnection, method: str, path: str, body: bytes | None) -> HTTPResponse:
    connection.request(method, path, body, {"Content-Type": "application/json"} if body else {})
    response = connection.getresponse()
    if response.status != 200:
        raise EngineError(f"{method} {path}: {response.status} {response.read().decode(errors='replace')[:1000]}")
    return response


def _generation(event: dict[str, Any], ttft_s: float, total_s: float) -> Generation:
    """From the last event of a stream, in which output_ids holds all of them. Raises EngineError for another shape."""
    try:
        meta = event["meta_info"]
        details = meta["cached_tokens_details"]
        cached = CachedTokens(int(details["device"]), int(details["host"]), int(details["storage"]))
        generation = Generation(tuple(event["output_ids"]), int(meta["prompt_tokens"]), cached, ttft_s, total_s)
        told = int(meta["completion_tokens"])
    except (KeyError, TypeError) as error:
        raise EngineError(f"the engine's last event lacks what /generate promises ({error!r}): {event}") from error
    if told != len(generation.output_ids) or cached.total != int(meta["cached_tokens"]):
        raise EngineError(f"the engine's last event contradicts itself: {event}")
    return generation
