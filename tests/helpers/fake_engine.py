"""A stand-in for an engine: /generate over HTTP with a cache of pages and no model. Can run as a child process.

Its answers depend on the prompt alone, unless --wrong-tiers-after says otherwise. Each page of a prompt is remembered
in a "device" of limited size (least recently used first out), then in a "host" of twice the size; with a storage path
every page also in a file there.
"""

import argparse
import hashlib
import json
import os
import signal
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

PAGE_SIZE = 64
NEVER = 1 << 62


class FakeCache:
    """Which pages are where; keys are digests of everything up to the page's end."""

    def __init__(self, device_tokens: int, storage: Path | None) -> None:
        self.capacity = {"device": device_tokens // PAGE_SIZE, "host": 2 * device_tokens // PAGE_SIZE if storage else 0}
        self.pages: dict[str, dict[str, None]] = {"device": {}, "host": {}}
        self.storage = storage
        self.stored = set(storage.read_text().split()) if storage and storage.exists() else set()

    def take(self, tokens: list[int]) -> dict[str, int]:
        """Tokens of the prompt by the tier they were found in; afterwards all of its pages are on the device."""
        found = {"device": 0, "host": 0, "storage": 0}
        digest = hashlib.sha256()
        hit = True
        for begin in range(0, len(tokens) - PAGE_SIZE, PAGE_SIZE):  # the last token is always computed
            digest.update(repr(tokens[begin : begin + PAGE_SIZE]).encode())
            key = digest.hexdigest()
            below = "storage" if key in self.stored else ""
            tier = next((name for name, pages in self.pages.items() if key in pages), below)
            hit = hit and bool(tier)
            if hit:
                found[tier] += PAGE_SIZE
            self._hold(key)
        return found

    def _hold(self, key: str) -> None:
        for pages in self.pages.values():
            pages.pop(key, None)
        self.pages["device"][key] = None
        if self.storage and key not in self.stored:
            self.stored.add(key)
            with self.storage.open("a") as file:
                file.write(key + "\n")
        for name, below in (("device", "host"), ("host", "")):
            if len(self.pages[name]) > self.capacity[name]:
                oldest = next(iter(self.pages[name]))
                del self.pages[name][oldest]
                if below and self.capacity[below]:
                    self.pages[below][oldest] = None


class Handler(BaseHTTPRequestHandler):
    """POST /generate, streamed; GET answers as /server_info."""

    protocol_version = "HTTP/1.1"
    server: "FakeEngine"

    def log_message(self, format: str, *args: object) -> None:
        """Quiet."""

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        engine = self.server
        with engine.lock:
            engine.requests.append(body)
            fail_status = engine.fail_status
        if fail_status or self.path != "/generate":
            self.send_response(fail_status or 404)
            self.send_header("Content-Length", "13")
            self.end_headers()
            self.wfile.write(b"asked to fail")
            return
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for event in engine.events(body["input_ids"], body["sampling_params"]["max_new_tokens"]):
            self._chunk(f"data: {event}\n\n".encode())
        self._chunk(b"")

    def do_GET(self) -> None:
        device, host = (len(pages) for pages in self.server.cache.pages.values())
        counters = {"device_pages_cached": device}
        if frames := self.server.cache.capacity["host"]:
            counters |= {"host_frames": frames, "host_frames_free": frames - host}
        body = json.dumps({"page_bytes": 1000, "internal_states": [counters]}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _chunk(self, data: bytes) -> None:
        self.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
        self.wfile.flush()


class FakeEngine(ThreadingHTTPServer):
    """`wrong_after`: after so many requests the last output token is another one."""

    daemon_threads = True

    def __init__(self, cache: FakeCache) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.cache = cache
        self.lock = threading.Lock()
        self.requests: list[dict[str, Any]] = []
        self.fail_status = 0
        self.wrong_after = self.hang_after = self.exit_after = NEVER
        self.replies: list[str] | None = None  # these events instead of the cache's

    def handle_error(self, request: object, client_address: object) -> None:
        """A client that goes away is nothing to print."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)  # type: ignore[arg-type]

    def events(self, tokens: list[int], max_new_tokens: int) -> list[str]:
        """The events of one answer: output_ids grow, meta_info comes with each."""
        if self.replies is not None:
            return self.replies
        with self.lock:
            found = self.cache.take(tokens)
            num_requests = len(self.requests)
        if num_requests > self.hang_after:
            threading.Event().wait()
        if num_requests > self.exit_after:
            print(f"leaving after {self.exit_after} requests", flush=True)
            os._exit(3)
        answer = list(hashlib.sha256(repr(tokens).encode()).digest()[:max_new_tokens])
        if num_requests > self.wrong_after:
            answer[-1] += 1
        meta = {"prompt_tokens": len(tokens), "cached_tokens": sum(found.values()), "cached_tokens_details": found}
        grown = ((answer[:count], {**meta, "completion_tokens": count}) for count in range(1, len(answer) + 1))
        return [*(json.dumps({"text": "", "output_ids": ids, "meta_info": info}) for ids, info in grown), "[DONE]"]


def main() -> None:
    """The engine's command line, as far as the demo uses it; unknown flags are accepted."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--max-total-tokens", type=int, default=1 << 20)
    parser.add_argument("--hicache-storage-backend-extra-config")
    for flag in ("--wrong-tiers-after", "--hang-after", "--exit-after"):
        parser.add_argument(flag, type=int, default=NEVER)
    parser.add_argument("--die", action="store_true")
    options, _ = parser.parse_known_args()
    if options.die:
        sys.exit("no such model: it died as it was asked to")
    config = options.hicache_storage_backend_extra_config
    storage = Path(json.loads(config)["path"]) / "pages.txt" if config else None
    if storage:
        storage.parent.mkdir(exist_ok=True)
    engine = FakeEngine(FakeCache(options.max_total_tokens, storage))
    engine.wrong_after = options.wrong_tiers_after if storage else NEVER
    engine.hang_after, engine.exit_after = options.hang_after, options.exit_after
    signal.signal(signal.SIGTERM, lambda *_: threading.Thread(target=engine.shutdown).start())
    print(f"pid {os.getpid()} listening on http://127.0.0.1:{engine.server_address[1]}", flush=True)
    engine.serve_forever(0.01)
    engine.server_close()


if __name__ == "__main__":
    main()
