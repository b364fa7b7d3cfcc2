"""Logs of processes that are ours, on standard error: one format, and no secrets of URLs in it."""

from __future__ import annotations

import logging

from storage_backends.secrets import text_without_secrets

FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


class SafeFormatter(logging.Formatter):
    """Hides the secrets of URLs, traces included: what libraries raise repeats the URLs that they were given."""

    def format(self, record: logging.LogRecord) -> str:
        return text_without_secrets(super().format(record))


def log_to_stderr(level: str) -> None:
    """From here on everything from `level` up ("INFO") is written, unless logging has been set up already."""
    handler = logging.StreamHandler()
    handler.setFormatter(SafeFormatter(FORMAT))
    logging.basicConfig(level=level, handlers=[handler])
    if level == "INFO":
        logging.getLogger("uvicorn").setLevel(logging.WARNING)  # it announces what is printed here already
