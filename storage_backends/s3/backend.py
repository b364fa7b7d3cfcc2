"""Objects in an S3 bucket: AWS, or anything that speaks its protocol. See README.md."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import boto3.session
import botocore.session
from botocore.client import BaseClient
from botocore.config import Config
from botocore.loaders import Loader, create_loader

from storage_backends.base import Capabilities, Outcome
from storage_backends.errors import StorageConfigError, StorageUnavailable
from storage_backends.per_object import PerObjectBackend
from storage_backends.s3.config import S3Config
from storage_backends.s3.failures import FAILURES, outcome_of
from storage_backends.s3.store import S3Store

CAPABILITIES: Final = Capabilities(
    name="s3",
    alignment_bytes=1,
    header_bytes=128,
    index_answers=False,
    persistent=True,
    shared=True,
    evicts=False,
    verifies=False,
    scattered=True,
    counted=False,
    remote=True,
)

# Descriptions of services, parsed once for all clients of the process: a session of its own parses 1 MB again.
_DESCRIPTIONS: Final[Loader] = create_loader()


def open_backend(options: Mapping[str, object]) -> PerObjectBackend:
    """Entry point `s3` of `cachesvc.storage_backends`.

    Asks for the bucket: StorageConfigError where it is not there or not for us, StorageUnavailable where nobody
    answers.
    """
    config = S3Config.parse(options)
    client = make_client(config)
    try:
        _check_bucket(client, config)
    except BaseException:
        client.close()
        raise
    return PerObjectBackend(CAPABILITIES, S3Store(client, config), config.connections)


def make_client(config: S3Config) -> BaseClient:
    """A boto3 client that never tries twice and has a connection for every thread of the backend, and for the scan."""
    when = "when_supported" if config.checksums == "on" else "when_required"
    try:
        core = botocore.session.get_session()
        core.register_component("data_loader", _DESCRIPTIONS)
        session = boto3.session.Session(botocore_session=core, profile_name=config.profile)
        return session.client(
            "s3",
            endpoint_url=config.endpoint,
            region_name=config.region or session.region_name or "us-east-1",
            aws_access_key_id=config.access_key_id,
            aws_secret_access_key=config.secret_access_key,
            aws_session_token=config.session_token,
            verify=None if config.ca_bundle is None else str(config.ca_bundle),
            config=Config(
                s3={"addressing_style": config.addressing},
                max_pool_connections=config.connections + 1,
                connect_timeout=config.connect_timeout_s,
                read_timeout=config.request_timeout_s,
                retries={"mode": "standard", "total_max_attempts": 1},
                request_checksum_calculation=when,
                # Every page is verified against its own header after it was read.
                response_checksum_validation="when_required",
                tcp_keepalive=True,
            ),
        )
    except (*FAILURES, ValueError) as error:
        raise StorageConfigError(f"no S3 client with these options: {error}") from error


def _check_bucket(client: BaseClient, config: S3Config) -> None:
    try:
        client.head_bucket(Bucket=config.bucket)
    except FAILURES as error:
        outcome, where = outcome_of(error), config.endpoint or "AWS"
        if outcome is Outcome.MISS:
            raise StorageConfigError(f"bucket={config.bucket!r} does not exist at {where}; create it first") from error
        if outcome.is_transient:
            raise StorageUnavailable(f"bucket={config.bucket!r} at {where}: {error}") from error
        raise StorageConfigError(f"bucket={config.bucket!r} at {where} cannot be used: {error}") from error
