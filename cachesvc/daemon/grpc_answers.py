"""From a method's result or exception to gRPC's answer: what is wrong with a request is a status with the reason, an
exception of ours is INTERNAL and logged, and the server lives."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, NoReturn, TypeVar

import grpc
from google.protobuf.message import Message

from cachesvc.client.base import AttachRefused
from cachesvc.metrics import Registry
from cachesvc.rpc.codec import BadMessage

log = logging.getLogger(__name__)

Reply = TypeVar("Reply", bound=Message)


class Answers:
    """Counts calls by how they ended. Thread-safe."""

    def __init__(self, registry: Registry) -> None:
        self._calls = registry.counter(
            "cachesvc_grpc_calls_total", "Calls at the gRPC door", result=["ok", "rejected", "refused", "failed"]
        )

    def answer(self, context: Any, work: Callable[[], Reply]) -> Reply:
        """What `work` returns; what it raises ends the call with a status."""
        try:
            reply = work()
        except BadMessage as error:
            self._calls.inc(1, "rejected")
            _abort(context, grpc.StatusCode.INVALID_ARGUMENT, f"{error.reason}: {error}")
        except AttachRefused as error:
            self._calls.inc(1, "refused")
            _abort(context, grpc.StatusCode.FAILED_PRECONDITION, f"{error.result}: {error}")
        except Exception as error:
            self._calls.inc(1, "failed")
            log.exception("a call at the gRPC door raised")
            _abort(context, grpc.StatusCode.INTERNAL, repr(error))
        self._calls.inc(1, "ok")
        return reply


def _abort(context: Any, code: grpc.StatusCode, reason: str) -> NoReturn:
    context.abort(code, reason)
    raise AssertionError("abort raises")
