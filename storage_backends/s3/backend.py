"""Objects in an S3 bucket: AWS, or anything that speaks its protocol. See README.md."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextlib import closing
from dataclasses import replace
from typing import Any, Final

import boto3.session
import botocore.session
from botocore.config import Config
from botocore.exceptions import NoCredentialsError, PartialCredentialsError
from botocore.loaders import Loader, create_loader

from storage_backends.base import Capabilities, Outcome
from storage_backends.errors import StorageConfigError
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

logger = logging.getLogger(__name__)

CREDENTIALS: Final = (
    "; give them in the environment (AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY), in ~/.aws/credentials (the option "
    "profile names one of several), or as the options access_key_id and secret_access_key"
)
_ANSWER_S: Final = 1.0
# Descriptions of services, parsed once for all clients of the process: a session of its own parses 1 MB again.
_DESCRIPTIONS: Final[Loader] = create_loader()


def open_backend(options: Mapping[str, object]) -> PerObjectBackend:
    """Entry point `s3` of `cachesvc.storage_backends`.

    Asks for the bucket: StorageConfigError where it is not there or not for us. Where nobody answers within a second
    it opens all the same: a service that is away may be back at any time.
    """
    config = S3Config.parse(options)
    check_bucket(config)
    return PerObjectBackend(CAPABILITIES, S3Store(make_client(config), config), config.connections)


def make_client(config: S3Config) -> Any:
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
    except FAILURES as error:
        raise StorageConfigError(f"no S3 client with these options: {error}") from error


def check_bucket(config: S3Config) -> None:
    """Raises StorageConfigError where the bucket is not there or not for us."""
    short = replace(
        config,
        connect_timeout_s=min(_ANSWER_S, config.connect_timeout_s),
        request_timeout_s=min(_ANSWER_S, config.request_timeout_s),
    )
    where = f"bucket={config.bucket!r} at {config.endpoint or 'AWS'}"
    with closing(make_client(short)) as client:
        try:
            client.head_bucket(Bucket=config.bucket)
        except FAILURES as error:
            outcome = outcome_of(error)
            if outcome is Outcome.MISS:
                raise StorageConfigError(f"{where} does not exist; create it first") from error
            if not outcome.is_transient:
                remedy = CREDENTIALS if isinstance(error, NoCredentialsError | PartialCredentialsError) else ""
                raise StorageConfigError(f"{where} cannot be used: {error}{remedy}") from error
            logger.warning("%s does not answer yet: %s", where, error)
