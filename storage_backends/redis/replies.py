"""What servers and redis-py say, as outcomes and errors of the storage contract."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import hiredis
import redis.exceptions
from cachekernels.spoiled_memory import MemoryFault

from storage_backends.errors import StorageError, StorageFailed, StorageTimeout, StorageUnavailable
from storage_backends.outcome import Outcome
from storage_backends.redis.wire import ProtocolBroken, Reply

MOVED: Final = 250
"""In arrays of outcomes, within this backend only: another server of the cluster has this key now."""
PENDING: Final = 251
"""Likewise: not answered yet."""

_BY_FIRST_WORD: Final = {
    "MOVED": MOVED,
    "ASK": Outcome.UNAVAILABLE,  # the slot is being moved; a moment later it is MOVED
    "TRYAGAIN": Outcome.UNAVAILABLE,
    "CLUSTERDOWN": Outcome.UNAVAILABLE,
    "CROSSSLOT": Outcome.FAILED,
    "LOADING": Outcome.UNAVAILABLE,
    "BUSY": Outcome.UNAVAILABLE,
    "MASTERDOWN": Outcome.UNAVAILABLE,
    "NOREPLICAS": Outcome.UNAVAILABLE,
    "READONLY": Outcome.UNAVAILABLE,  # a replica: it was, or is to be, the primary
    "MISCONF": Outcome.UNAVAILABLE,  # its disk is full; it takes writes again when there is space
    "OOM": Outcome.NO_SPACE,
    "WRONGTYPE": Outcome.UNSUPPORTED,
}
_NO_SUCH_KEY = "no such key"


def outcome_of(reply: Reply) -> int:
    """Outcome of a reply that is not the expected one."""
    if not isinstance(reply, hiredis.ReplyError):
        raise ProtocolBroken(f"{reply!r} is no reply to what was asked")
    text = str(reply)
    if _NO_SUCH_KEY in text:
        # Of a rename: the server, short of memory, has evicted the temporary object already.
        return Outcome.NO_SPACE
    return _BY_FIRST_WORD.get(text.partition(" ")[0], Outcome.FAILED)


def is_error(reply: Reply) -> bool:
    """Whether the server refused."""
    return isinstance(reply, hiredis.ReplyError)


@contextmanager
def errors_of(server: object) -> Iterator[None]:
    """Raises what goes wrong in the body as a StorageError that names the server; MemoryFault where it is the caller's
    memory, which is nobody's fault here."""
    try:
        yield
    except MemoryFault:
        raise
    except (redis.exceptions.AuthenticationError, redis.exceptions.AuthorizationError) as error:
        raise StorageFailed(f"the server refuses this user: {error}", server=str(server)) from error
    except (redis.exceptions.TimeoutError, TimeoutError, BlockingIOError) as error:
        raise StorageTimeout("no answer from the server", server=str(server)) from error
    except (redis.exceptions.ConnectionError, OSError) as error:
        if isinstance(error, OSError) and error.errno == errno.EFAULT:  # the kernel could not read or write it
            raise MemoryFault("the memory of a page is gone") from error
        raise StorageUnavailable(f"the server cannot be reached: {error}", server=str(server)) from error
    except redis.exceptions.ResponseError as error:
        raise _refusal(str(error), server) from error
    except (ProtocolBroken, hiredis.ProtocolError, redis.exceptions.RedisError) as error:
        raise StorageFailed(f"the server does not speak as Redis does: {error}", server=str(server)) from error


def _refusal(text: str, server: object) -> StorageError:
    is_transient = _BY_FIRST_WORD.get(text.partition(" ")[0]) == Outcome.UNAVAILABLE
    kind = StorageUnavailable if is_transient else StorageFailed
    return kind(f"the server refuses: {text}", server=str(server))
