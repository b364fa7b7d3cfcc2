"""From the bytes of a request to gRPC's answer: what is wrong with a request is a status with the reason, an exception
of ours is INTERNAL and logged, and the server lives.

Requests are parsed here and not by gRPC, which would answer INTERNAL to bytes that are no message.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from typing import Any, NoReturn, TypeVar

import grpc
from google.protobuf.message import Message

from cachesvc.client.base import AttachRefused
from cachesvc.metrics import Registry
from cachesvc.rpc import codec
from cachesvc.rpc.codec import BadMessage

log = logging.getLogger(__name__)

Request = TypeVar("Request", bound=Message)
Reply = TypeVar("Reply", bound=Message)
Methods = dict[str, Any]
"""grpc.RpcMethodHandler by name."""


class Answers:
    """Counts calls by how they ended. Thread-safe."""

    def __init__(self, registry: Registry) -> None:
        self._calls = registry.counter(
            "cachesvc_grpc_calls_total", "Calls at the gRPC door", result=["ok", "rejected", "refused", "failed"]
        )

    def method(self, kind: type[Request], work: Callable[[Request, float], Message]) -> Any:
        """A method of one request and one answer, for gRPC. `work` is given the request and the seconds that its caller
        will wait (inf: for good); it may raise BadMessage and AttachRefused, and is called on a thread of the
        server's."""

        def obey(data: bytes, time_left_s: float | None) -> Message:
            request = kind()
            codec.parse(request, data)
            return work(request, math.inf if time_left_s is None else time_left_s)

        return grpc.unary_unary_rpc_method_handler(
            lambda data, context: self._answer(context, lambda: obey(data, context.time_remaining())),
            response_serializer=lambda reply: reply.SerializeToString(),
        )

    def _answer(self, context: Any, work: Callable[[], Reply]) -> Reply:
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
