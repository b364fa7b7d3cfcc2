"""Objects as values of a Redis or Valkey server, or of a cluster of them.

DESIGN. A put goes: which keys are there already (EXISTS), values to temporary names straight from the caller's memory
(SET, with a time to live of a minute), the guard, and for each key a transaction that sets its time to live for good,
renames it (RENAMENX), and removes it where somebody was faster. So nothing is visible before the guard has been asked,
a name holds a whole object or none, with the life it is to have, the first of two writers wins, and what a writer
leaves behind when it dies vanishes by itself. No script is needed, so a server that denies EVAL serves as well as any
other.

See spread.py for how a batch is split over servers and connections, topology.py for who has which key, wire.py for how
bytes move.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Mapping
from contextlib import suppress

import hiredis
import numpy as np
from numpy.typing import NDArray

from storage_backends.base import (
    Capabilities,
    Guard,
    ObjectIds,
    Outcome,
    Outcomes,
    ScanBatch,
    Segments,
    StorageBackend,
    Usage,
    check_batch,
)
from storage_backends.errors import StorageConfigError, StorageError, StorageFailed, StorageUnavailable
from storage_backends.in_flight import InFlight
from storage_backends.redis.config import RedisConfig
from storage_backends.redis.names import Names, Rows, argument, check_ids, command, words
from storage_backends.redis.replies import is_error, outcome_of
from storage_backends.redis.spread import Spread
from storage_backends.redis.topology import open_topology
from storage_backends.redis.wire import Buffer, Reply, Wire
from storage_backends.segment_views import starts_alike, views

logger = logging.getLogger(__name__)

CAPABILITIES = Capabilities(
    name="redis",
    alignment_bytes=1,
    header_bytes=128,
    index_answers=False,
    persistent=True,
    shared=True,
    evicts=False,
    verifies=False,
    scattered=True,
    counted=False,
    bounded_by="the server's maxmemory",
    dated=False,
    remote=True,
)
MAX_VALUE_BYTES = 512 * 2**20
"""The server's own limit."""

_INFO_MEMORY = b"*2\r\n" + words(b"INFO", b"memory")
_UNBOUNDED = "maxmemory:0\\r\\n"
_TEMPORARY_MS = 60_000
_SET_END = b"\r\n" + words(b"PX", b"%d" % _TEMPORARY_MS)
_RENAMED = b"+OK\r\n+QUEUED\r\n+QUEUED\r\n+QUEUED\r\n*3\r\n:?\r\n:?\r\n:?\r\n"  # a refusal says more
_WINDOW_BYTES = 8 * 2**20  # values asked for and not yet received, of one connection
_SCAN_COUNT = 1000


def open_backend(options: Mapping[str, object]) -> RedisBackend:
    """Entry point `redis` of `cachesvc.storage_backends`. Raises StorageConfigError when the server cannot be reached
    or refuses us."""
    config = RedisConfig.parse(options)
    backend = RedisBackend(config)
    if config.checks_at_start:
        try:
            backend.check()
        except StorageError as error:
            backend.close()
            raise StorageConfigError(
                f"url: {backend.url()}: {error}; see to it, or start without it: with optional = true for a daemon's "
                "tier, else with check_at_start = false"
            ) from error
    return backend


class RedisBackend(StorageBackend):
    """One value per object, in servers that any number of nodes share. Opening does no I/O."""

    def __init__(self, config: RedisConfig) -> None:
        self._config = config
        self._names = Names(config.prefix)
        self._topology = open_topology(config)
        self._spread = Spread(self._topology, config.connections)
        self._calls = InFlight("redis")
        self._lock = threading.Lock()
        self._temporaries_left = 0

    def check(self) -> None:
        """Raises StorageError unless the server, or any of a cluster, can be reached and lets us in. Warns of servers
        without a limit."""
        with self._calls.call():
            self._topology.check()
            for server in self._topology.servers():
                with suppress(StorageError):  # it may tell only some users
                    if _UNBOUNDED in str(server.ask(_INFO_MEMORY)):
                        logger.warning("%s has no maxmemory: nothing bounds what is stored there", server.address)

    def capabilities(self) -> Capabilities:
        return CAPABILITIES

    def contains(self, ids: ObjectIds) -> Outcomes:
        check_ids(ids)
        with self._calls.call():
            return self._contains(ids)

    def get_into(self, ids: ObjectIds, segments: Segments) -> Outcomes:
        check_ids(ids)
        check_batch(ids, segments)
        lengths = segments.object_lengths()
        keys = self._names.keys(ids)
        window = max(1, int(_WINDOW_BYTES // max(1, int(lengths.max(initial=1)))))

        def get(wire: Wire, which: NDArray[np.intp], result: Outcomes) -> None:
            asked = command(b"*2\r\n" + words(b"GET"), *argument(keys[which]))
            wire.send_rows(asked[:window])
            for place, i in enumerate(which):
                if place % window == 0 and place + window < len(which):
                    # The server reads the next window from its medium, memory, while this one is received.
                    wire.send_rows(asked[place + window : place + 2 * window])
                result[i] = _got(wire.value_into(views(segments, i)), int(lengths[i]))

        with self._calls.call():
            return self._spread.do(ids, get, lengths)

    def put_from(self, ids: ObjectIds, segments: Segments, guard: Guard | None = None) -> Outcomes:
        check_ids(ids)
        check_batch(ids, segments)
        with self._calls.call():
            there = self._contains(ids)
            result = np.where(there == Outcome.OK, Outcome.EXISTS, there).astype(np.uint8)
            result[(there == Outcome.MISS) & (segments.object_lengths() > MAX_VALUE_BYTES)] = Outcome.TOO_LARGE
            wanted = np.flatnonzero(result == Outcome.MISS)
            if len(wanted):
                result[wanted] = self._put(ids[wanted], segments.take(wanted), _chosen(guard, wanted))
            return result

    def _put(self, ids: ObjectIds, segments: Segments, guard: Guard | None) -> Outcomes:
        keys = self._names.keys(ids)
        temporary = self._names.temporary(keys)
        result = self._set(ids, segments, temporary)
        written = result == Outcome.OK
        if not written.any():
            return result
        left = written
        try:
            kept = written if guard is None else written & guard()
            left = written & ~kept
            result[left] = Outcome.CHANGED
            result[kept] = self._rename(ids, temporary, keys, np.flatnonzero(kept))
            left = written & ~np.isin(result, (Outcome.OK, Outcome.EXISTS, Outcome.UNAVAILABLE, Outcome.TIMEOUT))
        finally:
            self._forget(ids, temporary, np.flatnonzero(left))
        return result

    def _set(self, ids: ObjectIds, segments: Segments, temporary: NDArray[np.uint8]) -> Outcomes:
        """Values under their temporary names."""
        lengths = segments.object_lengths()
        heads = command(b"*5\r\n" + words(b"SET"), *argument(temporary))

        def put(wire: Wire, which: NDArray[np.intp], result: Outcomes) -> None:
            buffers: list[Buffer] = []
            for i in which:
                buffers += [heads[i].tobytes() + b"$%d\r\n" % lengths[i], *views(segments, i), _SET_END]
            wire.send(buffers)
            result[which] = [Outcome.OK if reply == b"OK" else outcome_of(reply) for reply in wire.replies(len(which))]

        return self._spread.do(ids, put, lengths)

    def _rename(
        self, ids: ObjectIds, temporary: NDArray[np.uint8], keys: NDArray[np.uint8], which: NDArray[np.intp]
    ) -> Outcomes:
        """Temporary objects at `which` become visible, where nobody was faster."""
        sources, targets = argument(temporary[which]), argument(keys[which])
        life: list[bytes | Rows] = [b"*2\r\n" + words(b"PERSIST"), *sources]
        if self._config.ttl_s is not None:
            life = [b"*3\r\n" + words(b"PEXPIRE"), *sources, words(b"%d" % (self._config.ttl_s * 1000))]
        # Of our own object, before it has its name: another writer's is not ours to give another time to live. As one
        # transaction, or what died in the middle would stay for ever.
        renaming: list[bytes | Rows] = [b"*3\r\n" + words(b"RENAMENX"), *sources, *targets]
        removing: list[bytes | Rows] = [b"*2\r\n" + words(b"UNLINK"), *sources]
        asked = command(b"*1\r\n" + words(b"MULTI"), *life, *renaming, *removing, b"*1\r\n" + words(b"EXEC"))

        def rename(wire: Wire, some: NDArray[np.intp], result: Outcomes) -> None:
            wire.send_rows(asked[some])
            done = wire.alike(len(some), _RENAMED)
            if done is not None:
                result[some] = np.where(done[:, 1], Outcome.OK, Outcome.EXISTS)
                return
            replies = wire.replies(5 * len(some))
            result[some] = [_renamed(replies[5 * at : 5 * at + 5]) for at in range(len(some))]

        return self._spread.do(np.ascontiguousarray(ids[which]), rename)

    def _forget(self, ids: ObjectIds, temporary: NDArray[np.uint8], which: NDArray[np.intp]) -> None:
        """Remove temporary objects; those that cannot be removed vanish by themselves."""

        def unlink(wire: Wire, some: NDArray[np.intp], result: Outcomes) -> None:
            wire.send_rows(command(b"*2\r\n" + words(b"UNLINK"), *argument(temporary[which[some]])))
            result[some] = _flagged(wire, len(some), yes=Outcome.OK, no=Outcome.MISS)

        if not len(which):
            return
        try:
            result = self._spread.do(np.ascontiguousarray(ids[which]), unlink)
            left = int((~np.isin(result, (Outcome.OK, Outcome.MISS))).sum())
        except StorageError:
            left = len(which)
        with self._lock:
            self._temporaries_left += left

    def delete(self, ids: ObjectIds) -> Outcomes:
        check_ids(ids)
        keys = self._names.keys(ids)

        def unlink(wire: Wire, which: NDArray[np.intp], result: Outcomes) -> None:
            wire.send_rows(command(b"*2\r\n" + words(b"UNLINK"), *argument(keys[which])))
            result[which] = _flagged(wire, len(which), yes=Outcome.OK, no=Outcome.MISS)

        with self._calls.call():
            return self._spread.do(ids, unlink)

    def sizes(self, ids: ObjectIds) -> NDArray[np.int64]:
        """-1 also for a key that holds something else than a value."""
        check_ids(ids)
        keys = self._names.keys(ids)
        found = np.full(len(ids), -1, dtype=np.int64)

        def measure(wire: Wire, which: NDArray[np.intp], result: Outcomes) -> None:
            # STRLEN alone does not tell an empty value from none.
            for name in (b"EXISTS", b"STRLEN"):
                wire.send_rows(command(b"*2\r\n" + words(name), *argument(keys[which])))
            replies = wire.replies(2 * len(which))
            for i, there, length in zip(which, replies[: len(which)], replies[len(which) :], strict=True):
                refused = there if is_error(there) else length
                result[i] = outcome_of(refused) if is_error(refused) else Outcome.OK
                if there and isinstance(length, int):
                    found[i] = length

        with self._calls.call():
            result = self._spread.do(ids, measure)
        if not np.isin(result, (Outcome.OK, Outcome.UNSUPPORTED)).all():
            raise StorageUnavailable("some servers did not say what they have", ids=len(ids))
        return found

    def set_aside(self, ids: ObjectIds, seen: Segments) -> Outcomes:
        """The server keeps nothing for inspection: an object set aside is removed."""
        check_ids(ids)
        check_batch(ids, seen)
        keys = self._names.keys(ids)

        def take_out(wire: Wire, which: NDArray[np.intp], result: Outcomes) -> None:
            for i in which:
                result[i] = _removed_if_seen(wire, keys[i : i + 1], views(seen, i))

        with self._calls.call():
            return self._spread.do(ids, take_out)

    def scan(self) -> Iterator[ScanBatch]:
        """An object may be listed twice while the server's table grows or a slot moves."""
        with self._calls.call():
            servers = self._topology.servers()
        for server in servers:
            cursor = b"0"
            while True:
                with self._calls.call():
                    asked = words(b"SCAN", cursor, b"MATCH", self._names.pattern, b"COUNT", b"%d" % _SCAN_COUNT)
                    cursor, ids = self._listed(server.ask(b"*6\r\n" + asked))
                if len(ids):
                    lengths = self.sizes(ids)
                    there = lengths >= 0
                    yield ScanBatch(ids[there], lengths[there], np.zeros(int(there.sum()), dtype=np.int64))
                if cursor == b"0":
                    break

    def _listed(self, reply: Reply) -> tuple[bytes, ObjectIds]:
        if not isinstance(reply, list) or len(reply) != 2:
            raise StorageFailed("SCAN was answered by something else", reply=repr(reply)[:100])
        cursor, keys = reply
        return cursor, self._names.ids_of(list(dict.fromkeys(keys)))

    def place(self) -> str:
        return f"{self.url()}, keys {self._config.prefix}*"

    def url(self) -> str:
        """The server, or those of the cluster that were named."""
        first = self._config.addresses[0]
        if first.path:
            return f"unix://{first.path}?db={self._config.db}"
        scheme = "rediss" if self._config.uses_tls else "redis"
        return f"{scheme}://{','.join(map(str, self._config.addresses))}/{self._config.db}"

    def usage(self) -> Usage:
        """Nobody counts: other nodes write here, and objects vanish by themselves."""
        return Usage(used_bytes=0, reserved_bytes=0, capacity_bytes=0, objects=0)

    def tallies(self) -> Mapping[str, int]:
        """redis_temporaries_left: objects never shown that could not be removed; they vanish within a minute.
        redis_exchanges_failed: those that ended in an error; their connections were dropped."""
        return {"redis_temporaries_left": self._temporaries_left, "redis_exchanges_failed": self._spread.num_failed}

    def close(self) -> None:
        if self._calls.close():
            self._spread.close()
            self._topology.close()

    def _contains(self, ids: ObjectIds) -> Outcomes:
        arguments = command(*argument(self._names.keys(ids)))
        most = self._topology.keys_a_command

        def ask(wire: Wire, which: NDArray[np.intp], result: Outcomes) -> None:
            if most > 1 and len(which) > most:
                which = _ask_groups(wire, arguments, which, result, most)
            if len(which):
                wire.send_rows(command(b"*2\r\n" + words(b"EXISTS"), arguments[which]))
                result[which] = _flagged(wire, len(which), yes=Outcome.OK, no=Outcome.MISS)

        return self._spread.do(ids, ask)


def _chosen(guard: Guard | None, which: NDArray[np.intp]) -> Guard | None:
    """The guard of these objects of a batch."""
    return None if guard is None else lambda: guard()[which]


def _ask_groups(wire: Wire, arguments: Rows, which: NDArray[np.intp], result: Outcomes, most: int) -> NDArray[np.intp]:
    """Asks how many of each `most` neighbours exist: all and none are answers. A command for each key costs the server,
    which has one thread, three times as much, and a prompt has one place where its stored pages end. Returns the
    positions that are still open."""
    groups = [which[begin : begin + most] for begin in range(0, len(which), most)]
    wire.send([b"*%d\r\n" % (len(group) + 1) + words(b"EXISTS") + arguments[group].tobytes() for group in groups])
    open_groups = [np.empty(0, dtype=np.intp)]
    for group, reply in zip(groups, wire.replies(len(groups)), strict=True):
        if reply == 0 or reply == len(group):
            result[group] = Outcome.OK if reply else Outcome.MISS
        else:  # some of them, or it is refused: asked one by one, the server says what is wrong
            open_groups.append(group)
    return np.concatenate(open_groups)


def _flagged(wire: Wire, count: int, *, yes: Outcome, no: Outcome) -> Outcomes:
    """Outcomes of `count` replies that should be 1 or 0."""
    replies = wire.flags(count)
    if isinstance(replies, np.ndarray):
        return np.where(replies, yes, no).astype(np.uint8)
    found = [(no, yes)[reply] if reply in (0, 1) else outcome_of(reply) for reply in replies]
    return np.array(found, dtype=np.uint8)


def _renamed(replies: list[Reply]) -> int:
    """Of the five replies to one transaction that renames."""
    ended = replies[4]
    # Where transactions are refused, the commands were carried out one by one.
    done = ended[1] if isinstance(ended, list) and len(ended) == 3 else replies[2]
    if done == b"QUEUED":
        return outcome_of(ended)
    return (Outcome.EXISTS, Outcome.OK)[done] if done in (0, 1) else outcome_of(done)


def _got(reply: int | hiredis.ReplyError, length: int) -> int:
    if not isinstance(reply, int):
        return outcome_of(reply)
    if reply < 0:
        return Outcome.MISS
    return Outcome.OK if reply == length else Outcome.CORRUPT


def _removed_if_seen(wire: Wire, key: NDArray[np.uint8], seen: list[memoryview]) -> int:
    """Remove a value that still begins as what was seen, by an optimistic transaction."""
    wire.send_rows(command(b"*2\r\n" + words(b"WATCH"), *argument(key)))
    (watched,) = wire.replies(1)
    if is_error(watched):
        return outcome_of(watched)
    wire.send_rows(command(b"*2\r\n" + words(b"GET"), *argument(key)))
    found = bytearray(sum(len(part) for part in seen))
    length = wire.value_into([memoryview(found)])
    if not isinstance(length, int) or length < 0 or not starts_alike(seen, bytes(found[:length])):
        wire.send([b"*1\r\n" + words(b"UNWATCH")])
        wire.replies(1)
        return Outcome.MISS if length == -1 else Outcome.CHANGED
    wire.send([b"*1\r\n" + words(b"MULTI")])
    wire.send_rows(command(b"*2\r\n" + words(b"UNLINK"), *argument(key)))
    wire.send([b"*1\r\n" + words(b"EXEC")])
    done = wire.replies(3)[2]
    return outcome_of(done) if is_error(done) else Outcome.CHANGED if done is None else Outcome.OK
