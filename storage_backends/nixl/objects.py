"""Objects in an S3 bucket, moved by NIXL's OBJ plug-in.

DESIGN. The plug-in moves bytes and no more: it has no listing, no removal, no "only if absent", and takes a short
object for a whole one. So this is the S3 backend, with boto3 for all that, and its bodies moved by NIXL. An upload is
asked about first, and a download's length is known before it begins. Whatever NIXL fails at is done again through
boto3, which says what is wrong.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

import numpy as np

from storage_backends.base import Outcome, Segments
from storage_backends.nixl.agent import Agent, Target, TransferFailed
from storage_backends.nixl.config import OBJECTS, parse_objects
from storage_backends.per_object import PerObjectBackend
from storage_backends.s3.backend import CAPABILITIES, check_bucket, make_client
from storage_backends.s3.config import S3Config
from storage_backends.s3.store import S3Store
from storage_backends.segment_views import fill

OBJECT_CAPABILITIES: Final = replace(CAPABILITIES, name="nixl")


def open_objects(options: Mapping[str, object]) -> PerObjectBackend:
    """options: those of the S3 backend. Raises StorageConfigError as that one does, and where the plug-in does not
    load."""
    config = parse_objects(options)
    check_bucket(config)
    client = make_client(config)
    agent = Agent(OBJECTS, parameters(config, client.meta.region_name), kind="OBJ")
    return PerObjectBackend(OBJECT_CAPABILITIES, NixlStore(client, config, agent), config.connections)


class NixlStore(S3Store):
    """`S3Store` with `agent`, which it owns, for the bodies."""

    def __init__(self, client: Any, config: S3Config, agent: Agent) -> None:
        super().__init__(client, config)
        self._agent = agent
        self._numbers = itertools.count(1)
        self.num_by_boto3 = 0
        """Bodies that NIXL could not move."""

    def read(self, name: str, into: list[memoryview]) -> Outcome:
        length = self.size(name)
        if length < 0:
            return Outcome.MISS
        if length == sum(len(part) for part in into):  # anything else may be anybody's, of any size
            value = np.empty(max(length, 1), dtype=np.uint8)
            try:
                self._agent.read([self._target(name, length)], _one(value))
                return Outcome.OK if fill(into, value.data) else Outcome.CORRUPT
            except TransferFailed:
                self.num_by_boto3 += 1
        return super().read(name, into)

    def write(self, name: str, value: bytes) -> Outcome:
        if self.size(name) >= 0:
            return Outcome.EXISTS
        try:
            self._agent.write([self._target(name, len(value))], _one(np.frombuffer(value, dtype=np.uint8)))
            return Outcome.OK
        except TransferFailed:
            self.num_by_boto3 += 1
        return super().write(name, value)

    def close(self) -> None:
        self._agent.close()
        super().close()

    def _target(self, name: str, num_bytes: int) -> Target:
        return Target(next(self._numbers), num_bytes, self._key(name))


def _one(value: np.ndarray[Any, np.dtype[np.uint8]]) -> Segments:
    return Segments.single(np.array([value.ctypes.data], dtype=np.uint64), len(value), value)


def parameters(config: S3Config, region: str) -> dict[str, str]:
    """The plug-in's own, so that it asks where and as boto3 does; credentials left out come from the chain of the AWS
    SDK inside it."""
    # boto3 puts the bucket into the host's name for AWS itself, and for others only when it is told to.
    is_virtual = config.addressing == "virtual" or (config.addressing == "auto" and config.endpoint is None)
    given = {
        "bucket": config.bucket,
        "region": region,
        "access_key": config.access_key_id,
        "secret_key": config.secret_access_key,
        "session_token": config.session_token,
        "endpoint_override": config.endpoint,
        "scheme": None if config.endpoint is None else config.endpoint.partition("://")[0],
        "use_virtual_addressing": "true" if is_virtual else "false",
        "req_checksum": "supported" if config.checksums == "on" else "required",
        "ca_bundle": None if config.ca_bundle is None else str(config.ca_bundle),
        "num_threads": str(config.connections),
    }
    return {name: value for name, value in given.items() if value is not None}
