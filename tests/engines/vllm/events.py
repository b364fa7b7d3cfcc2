"""What vLLM publishes about its caches, received as a router receives it."""

from __future__ import annotations

import threading
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import msgspec
import zmq

POLL_MS = 100


class Subscriber:
    """A context: while it is open, `events` grows by one dict (`type` and fields) per event, in order."""

    def __init__(self, folder: Path) -> None:
        self._endpoint = f"ipc://{folder}/events"
        self.flags = (
            "--kv-events-config",
            msgspec.json.encode(
                {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": self._endpoint, "topic": ""}
            ).decode(),
        )
        self.events: list[dict[str, Any]] = []
        self._is_open = True
        self._thread = threading.Thread(target=self._receive, name="subscriber")

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._is_open = False
        self._thread.join()

    def on(self, medium: str) -> set[object]:
        """The hashes of the blocks that are there, if one believes the events."""
        there: set[object] = set()
        for event in list(self.events):
            if event["type"] == "AllBlocksCleared":
                there.clear()
            elif event["medium"] == medium:
                hashes = event["block_hashes"]
                there = there | set(hashes) if event["type"] == "BlockStored" else there - set(hashes)
        return there

    def _receive(self) -> None:
        from vllm.distributed.kv_events import KVEventBatch

        decoder = msgspec.msgpack.Decoder(KVEventBatch)
        context = zmq.Context()
        socket = context.socket(zmq.SUB)
        try:
            socket.connect(self._endpoint)
            socket.subscribe(b"")
            while self._is_open:
                if socket.poll(POLL_MS):
                    batch = decoder.decode(socket.recv_multipart()[-1])
                    self.events += [
                        {"type": type(event).__name__, **msgspec.structs.asdict(event)} for event in batch.events
                    ]
        finally:
            socket.close(0)
            context.term()
