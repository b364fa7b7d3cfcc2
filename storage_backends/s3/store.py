"""One object at a time in an S3 bucket, through boto3.

DESIGN. boto3 does not try again by itself: that is the retry layer's, which also asks the guard again. A body is read
in pieces, and against the clock, because boto3's time-out starts anew with every byte. Uploads carry If-None-Match, so
that of two writers of one name the second is told EXISTS.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any, Final

from botocore.client import BaseClient

from storage_backends.base import Outcome
from storage_backends.names import NAME_DIGITS, is_name
from storage_backends.per_object import Listing, ObjectError, ObjectStore
from storage_backends.s3.config import S3Config
from storage_backends.s3.failures import FAILURES, object_error, outcome_of
from storage_backends.segment_views import fill, starts_alike

SUFFIX: Final = ".page"
_PIECE_BYTES: Final = 1024 * 1024


class S3Store(ObjectStore):
    """Objects `PREFIX<72 digits>.page` of one bucket. client: a boto3 S3 client, owned from here on."""

    def __init__(self, client: BaseClient, config: S3Config, clock: Callable[[], float] = time.monotonic) -> None:
        # boto3 makes its methods at run time.
        self._client: Any = client
        self._bucket = config.bucket
        self._prefix = config.prefix
        self._is_conditional = config.conditional == "on"
        self._timeout_s = config.request_timeout_s
        self._clock = clock

    def size(self, name: str) -> int:
        try:
            answer = self._client.head_object(Bucket=self._bucket, Key=self._key(name))
        except FAILURES as error:
            if outcome_of(error) is Outcome.MISS:
                return -1
            raise object_error(error, self._key(name)) from error
        if "ContentLength" not in self._expect(answer, name, 200):
            raise ObjectError(Outcome.FAILED, f"{self._key(name)}: the service tells no length")
        return int(answer["ContentLength"])

    def read(self, name: str, into: list[memoryview]) -> Outcome:
        deadline_s = self._clock() + self._timeout_s
        try:
            answer = self._client.get_object(Bucket=self._bucket, Key=self._key(name))
            with self._body(answer, name) as body:
                room = sum(len(part) for part in into)
                length = int(answer.get("ContentLength", room))
                got = self._fill(body, into, min(room, length), deadline_s, name)
                # Without a length in the headers, only the end of the body tells.
                is_whole = length == room == got and ("ContentLength" in answer or not body.read(1))
                return Outcome.OK if is_whole else Outcome.CORRUPT
        except FAILURES as error:
            if outcome_of(error) is Outcome.MISS:
                return Outcome.MISS
            raise object_error(error, self._key(name)) from error

    def write(self, name: str, value: bytes) -> Outcome:
        condition = {"IfNoneMatch": "*"} if self._is_conditional else {}
        if not self._is_conditional and self.size(name) >= 0:
            return Outcome.EXISTS
        try:
            answer = self._client.put_object(Bucket=self._bucket, Key=self._key(name), Body=value, **condition)
        except FAILURES as error:
            if self._is_conditional and outcome_of(error) is Outcome.EXISTS:
                return Outcome.EXISTS
            raise object_error(error, self._key(name)) from error
        self._expect(answer, name, 200)
        return Outcome.OK

    def remove(self, name: str) -> Outcome:
        # The service says 204 whether there was an object or not.
        if self.size(name) < 0:
            return Outcome.MISS
        return self._delete(name, {})

    def remove_if(self, name: str, seen: list[memoryview]) -> Outcome:
        deadline_s = self._clock() + self._timeout_s
        try:
            answer = self._client.get_object(Bucket=self._bucket, Key=self._key(name))
            found = memoryview(bytearray(sum(len(part) for part in seen)))  # it may be anybody's, of any size
            with self._body(answer, name) as body:
                got = self._fill(body, [found], len(found), deadline_s, name)
        except FAILURES as error:
            if outcome_of(error) is Outcome.MISS:
                return Outcome.MISS
            raise object_error(error, self._key(name)) from error
        if not starts_alike(seen, bytes(found[:got])):
            return Outcome.CHANGED
        return self._delete(name, {"IfMatch": answer["ETag"]} if "ETag" in answer else {})

    def listing(self) -> Iterator[Listing]:
        pages = self._client.get_paginator("list_objects_v2").paginate(Bucket=self._bucket, Prefix=self._prefix)
        try:
            for page in pages:
                yield [
                    (name, int(entry["Size"]), int(entry["LastModified"].timestamp() * 1e9))
                    for entry in page.get("Contents", [])
                    if (name := self._name(entry["Key"])) is not None
                ]
        except FAILURES as error:
            raise object_error(error, f"listing {self._prefix}") from error

    def place(self) -> str:
        return f"s3://{self._bucket}/{self._prefix}"

    def close(self) -> None:
        self._client.close()

    def _delete(self, name: str, condition: dict[str, str]) -> Outcome:
        try:
            answer = self._client.delete_object(Bucket=self._bucket, Key=self._key(name), **condition)
        except FAILURES as error:
            outcome = outcome_of(error)
            if outcome is Outcome.MISS:
                return Outcome.MISS
            if condition and outcome is Outcome.EXISTS:
                return Outcome.CHANGED
            raise object_error(error, self._key(name)) from error
        self._expect(answer, name, 200, 204)
        return Outcome.OK

    def _fill(self, body: Any, into: list[memoryview], limit: int, deadline_s: float, name: str) -> int:
        """Read up to `limit` bytes into the parts, in order; how many arrived."""
        got = 0
        for part in into:
            at = 0
            while at < len(part) and got < limit:
                piece = body.read(min(_PIECE_BYTES, len(part) - at, limit - got))
                if not piece:
                    return got
                # Not by readinto, which copies as well, and without a guard: the part may be memory that faults.
                fill([part[at : at + len(piece)]], piece)
                at, got = at + len(piece), got + len(piece)
                if self._clock() > deadline_s:
                    raise ObjectError(Outcome.TIMEOUT, f"{self._key(name)}: the body took over {self._timeout_s:g} s")
        return got

    def _body(self, answer: dict[str, Any], name: str) -> Any:
        """The body of a 200, as a context: what is left unread closes the connection."""
        return _Closing(self._expect(answer, name, 200)["Body"])

    def _expect(self, answer: dict[str, Any], name: str, *statuses: int) -> dict[str, Any]:
        status = answer["ResponseMetadata"]["HTTPStatusCode"]
        if status not in statuses:
            raise ObjectError(Outcome.FAILED, f"{self._key(name)}: unexpected status {status}")
        return answer

    def _key(self, name: str) -> str:
        return f"{self._prefix}{name}{SUFFIX}"

    def _name(self, key: str) -> str | None:
        name = key[len(self._prefix) : len(self._prefix) + NAME_DIGITS]
        return name if is_name(name) and key == self._key(name) else None


class _Closing:
    """botocore's own context hands out the raw stream, whose errors are urllib3's."""

    def __init__(self, body: Any) -> None:
        self._body = body

    def __enter__(self) -> Any:
        return self._body

    def __exit__(self, *_: object) -> None:
        self._body.close()
