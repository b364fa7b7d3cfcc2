"""Opens the tiers of a configuration, and finds out before a door opens whether they answer."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TypeVar

import numpy as np

from cachesvc.config.model import ConfigError, TierConfig
from cachesvc.node.tiers import Tier, TierOptions, check_places, demotions
from storage_backends.base import OBJECT_ID_BYTES, Outcome, StorageBackend
from storage_backends.bounds import as_bounded, in_bounds
from storage_backends.errors import StorageConfigError, StorageError, UnknownOption
from storage_backends.layers.expiry import ExpiryLayer, check_dated
from storage_backends.registry import WITHOUT_SERVICE, look_at_backend, open_backend

OPEN_S = 20.0
"""How long a tier may take to open, the loading of its libraries included: seconds on a busy machine."""
ANSWER_S = 2.0
"""How long it may take to answer a first question, or to close after a wrong answer."""

T = TypeVar("T")


def open_tiers(configs: Sequence[TierConfig], *, takes_part: bool = True) -> list[Tier]:
    """Open tiers in the same order; the caller closes them. ConfigError names the tier and what is wrong with it;
    nothing is left open then, apart from what hangs. Without `takes_part` they are there to be looked at only: nothing
    that others use is joined, scanned or changed."""
    tiers: list[Tier] = []
    try:
        for index, config in enumerate(configs):
            options = TierOptions(config.write_mode, config.promote, config.codec, config.admit_after)
            backend, trouble = _open(index, config, takes_part)
            tiers.append(Tier(config.label, backend, options, trouble))
        _check_order(tiers)
    except ConfigError:
        for tier in tiers:
            tier.backend.close()
        raise
    return tiers


def _check_order(tiers: Sequence[Tier]) -> None:
    """ConfigError: a tier waits for what another one gives up, and none does; or two are one place."""
    try:
        check_places(tiers)
        demotions(tiers)
    except ValueError as error:
        raise ConfigError(str(error)) from error


def _open(index: int, config: TierConfig, takes_part: bool) -> tuple[StorageBackend, str]:
    """The backend, and what is wrong with it where it is optional."""
    place = f"tier[{index}] ({config.label})"
    open_one = open_backend if takes_part else look_at_backend
    try:
        backend = _bounded(lambda: open_one(config.backend, _options(config)), OPEN_S)
    except UnknownOption as error:
        is_ours = error.option in TierConfig.model_fields
        where = "; as a key of the tier it belongs above [tier.options]" if is_ours else ""
        raise ConfigError(f"{place}: {error}{where}") from error
    except StorageConfigError as error:
        raise ConfigError(f"{place}: {error}") from error
    except (StorageError, OSError, TimeoutError) as error:
        raise ConfigError(f"{place}: cannot be opened: {error}; see to it, or take the tier out") from error
    trouble = _trouble(backend)
    if trouble and not config.optional:
        with suppress(StorageError, OSError, TimeoutError):  # what is wrong with it is told below
            _bounded(backend.close, ANSWER_S)
        raise ConfigError(
            f"{place}: {trouble}; start what it needs, take the tier out, or set optional = true to start without it"
        )
    try:
        if config.ttl_s is not None:
            check_dated(backend.capabilities())
    except ValueError as error:
        _bounded(backend.close, ANSWER_S)
        raise ConfigError(f"{place}: ttl_s: {error}") from error
    try:
        return _in_bounds(backend, config) if takes_part else as_bounded(backend, config.capacity_bytes), trouble
    except (ValueError, OSError) as error:
        _bounded(backend.close, ANSWER_S)
        raise ConfigError(f"{place}: capacity_bytes: {error}") from error


def _options(config: TierConfig) -> dict[str, object]:
    """The backend's options; of an optional tier such that it opens while its service is away."""
    return {**WITHOUT_SERVICE.get(config.backend, {}), **config.options} if config.optional else config.options


def _in_bounds(backend: StorageBackend, config: TierConfig) -> StorageBackend:
    backend = in_bounds(backend, config.capacity_bytes)
    return backend if config.ttl_s is None else ExpiryLayer(backend, config.ttl_s)


def _trouble(backend: StorageBackend) -> str:
    """Why the backend does not answer; empty if it does."""
    unknown = np.frombuffer(os.urandom(OBJECT_ID_BYTES), np.uint8).reshape(1, -1).copy()
    try:
        answer = Outcome(int(_bounded(lambda: backend.contains(unknown), ANSWER_S)[0]))
    except (StorageError, OSError, TimeoutError) as error:
        return f"does not answer: {error}"
    return "" if answer in (Outcome.OK, Outcome.MISS) else f"answers {answer.name.lower()} when asked for a page"


def _bounded(call: Callable[[], T], timeout_s: float) -> T:
    """What `call` returns or raises, on a thread that is left behind after `timeout_s`: TimeoutError."""
    results: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(call())
        except BaseException as error:  # handed on below
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(timeout_s)
    if errors:
        raise errors[0]
    if not results:
        raise TimeoutError(f"no answer within {timeout_s:g} s")
    return results[0]
