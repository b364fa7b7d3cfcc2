"""Errors of the storage tier.

    StorageError                 kind, transient or permanent, the outcome it stands for, and its context
    |-- StorageUnavailable       transient: the medium cannot be reached now (too many open files, connection lost)
    |   |-- StorageTimeout       transient: no answer within the deadline
    |   `-- StorageThrottled     transient: not tried now, on purpose (too many calls at once)
    `-- StorageFailed            permanent: trying again will not help (read-only medium, permission, I/O error)
        |-- StorageClosed        the backend was closed; a bug of the caller
        `-- StorageConfigError   found while opening: unknown key, bad value, unusable directory (also a ValueError)
                `-- UnknownOption   ... a key that the backend does not have

What happens to single objects is an `Outcome` per object and never an exception. An exception means that the call as a
whole was not carried out. Whether it may be tried again is a property of the error, so that a retry layer needs no
knowledge of any backend.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from storage_backends.outcome import Outcome
from storage_backends.secrets import text_without_secrets


class StorageError(Exception):
    """A storage call that was not carried out.

    `context` says where (backend, path, errno ...), for logs; it is also part of the message, in which the secrets of
    URLs are hidden: errors are shown, logged and sent to whoever asks for a tier's health.
    """

    transient: ClassVar[bool] = False
    outcome: ClassVar[Outcome] = Outcome.FAILED

    def __init__(self, message: str, **context: object) -> None:
        self.context: Mapping[str, object] = context
        details = ", ".join(f"{name}={value!r}" for name, value in context.items())
        super().__init__(text_without_secrets(f"{message} ({details})" if details else message))

    @property
    def kind(self) -> str:
        """The class name, as used in logs and as the label of metrics."""
        return type(self).__name__


class StorageUnavailable(StorageError):
    """The medium cannot be reached now; the same call may succeed later."""

    transient = True
    outcome = Outcome.UNAVAILABLE


class StorageTimeout(StorageUnavailable):
    """No answer within the deadline; the same call may succeed later."""

    outcome = Outcome.TIMEOUT


class StorageThrottled(StorageUnavailable):
    """Not tried now, on purpose; trying again at once is what is to be avoided."""

    outcome = Outcome.THROTTLED


class StorageFailed(StorageError):
    """The call failed and will fail again."""


class StorageClosed(StorageFailed):
    """The backend was closed before this call."""


class StorageConfigError(StorageFailed, ValueError):
    """The configuration cannot work; the message names the key, the value and what would be valid."""


class UnknownOption(StorageConfigError):
    """A key that the backend does not have; `option` is its name."""

    def __init__(self, message: str, option: str) -> None:
        super().__init__(message)
        self.option = option
