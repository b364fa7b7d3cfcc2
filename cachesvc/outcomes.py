"""Every reason the node, or the cache of an engine above it, can give, once.

The outcome of one page is `storage_backends.base.Outcome`; these are the rest.

The values are metric labels and stay stable: rename one and every dashboard that shows it breaks.
"""

from __future__ import annotations

from enum import StrEnum


class OpEnd(StrEnum):
    """Why an op ended. Comes after the last page of the op has its outcome; no frame of the op is touched
    afterwards."""

    COMPLETED = "completed"  # every page was answered well
    BAD_PAGE = "bad_page"  # a page could not be had; the ones behind it were answered CANCELLED without being touched
    CANCELLED = "cancelled"  # the caller asked
    FAILED = "failed"  # the node's own code raised; counted, and logged with its trace
    DRAINED = "drained"  # the session drains: reads are not wanted any more, stores ran out of time
    DETACHED = "detached"  # the session is gone
    LOST = "lost"  # the connection between engine and node ended
    DECLINED = "declined"  # the node did not accept the op after all; it counts why


class Decline(StrEnum):
    """Why the node did not accept an op. Nothing was queued and no frame was lent."""

    CACHE_OFF = "cache_off"  # the session attached with the cache off
    DRAINING = "draining"  # the session or the node is going away
    TOO_MANY_OPS = "too_many_ops"  # ops of this session whose end has not been polled yet
    QUEUE_FULL = "queue_full"  # pages of this session waiting to be stored
    NO_TIER = "no_tier"  # no storage tier takes writes
    NODE_AWAY = "node_away"  # no connection to the node; it is looked for in the background
    NODE_SILENT = "node_silent"  # the node is connected and owes an answer
    TOO_LARGE = "too_large"  # more pages than one message can carry
    OUTPUT_FULL = "output_full"  # what the node has not read yet has filled the client's queue


class AttachResult(StrEnum):
    """How an attach ended."""

    ATTACHED = "attached"
    OFF = "off"  # attached with the cache off: a pool this node cannot keep
    REFUSED_IDENTITY = "refused_identity"  # the group is attached with another identity
    REFUSED_GEOMETRY = "refused_geometry"  # frame_bytes is not what the identity's page takes
    REFUSED_MEMORY = "refused_memory"  # the region does not fit
    REFUSED_DRAINING = "refused_draining"  # the node is going away
    REFUSED_BUSY = "refused_busy"  # ops on the region still run, or another session has it; to be tried again
    REFUSED_VERSION = "refused_version"  # other versions of the messages or of regions
    REFUSED_MALFORMED = "refused_malformed"  # the first message was not understood, or did not come in time
    REFUSED_FAILED = "refused_failed"  # the node's own code raised; logged with its trace
    REFUSED_CONNECTIONS = "refused_connections"  # too many are open
    REFUSED_DESCRIPTORS = "refused_descriptors"  # the node may open too few more; to be tried again
    REFUSED_REGION = "refused_region"  # the offered memory is not the engine's to offer: the node manages it itself


class Reject(StrEnum):
    """Why a door did not obey a message. Nothing was done."""

    UNDECODABLE = "undecodable"  # not a message of this protocol
    UNKNOWN = "unknown"  # a message that this version, or this kind of session, does not know
    BAD_LENGTH = "bad_length"  # arrays that are not whole, or do not belong together
    BAD_FRAMES = "bad_frames"  # frames that the session does not have, or that are lent already
    BAD_OP = "bad_op"  # an op number that is not above all before it: sent twice, or out of order
    BAD_VALUE = "bad_value"  # a number that cannot be meant
    OVERSIZED = "oversized"  # longer than messages may be; ends the session


class PageSource(StrEnum):
    """Where a prefetched page came from, when not from a tier (tiers go by their own names)."""

    JOINED = "joined"  # copied from the frame of a read that was in flight
    REGION = "region"  # copied from a frame that the index knew


class Unsaved(StrEnum):
    """Why an accepted page was not stored."""

    CHANGED = "changed"  # its frame was rewritten meanwhile
    NOT_ADMITTED = "not_admitted"  # not used often enough for any tier
    TIER = "tier"  # no tier took it; each tier counts its own outcomes
    AFTER_BAD_PAGE = "after_bad_page"  # a page before it failed, and pages behind a hole can never hit
    CANCELLED = "cancelled"
    FAILED = "failed"  # the node's own code raised
    DRAINED = "drained"
    DETACHED = "detached"
    QUEUE_FULL = "queue_full"  # put into node-managed memory while too many others waited to be stored
    LOST = "lost"  # the connection to its engine broke


class Conserved(StrEnum):
    """What must be nothing while a node is idle."""

    LENT = "lent"  # frames on loan to no op
    WAITING = "waiting"  # pages that count as waiting to be stored
    FLIGHTS = "flights"  # transfers that nobody makes
    INDEX = "index"  # the index disagrees with itself
    SLABS = "slabs"  # slabs of node-managed memory whose account does not add up


class RegionSource(StrEnum):
    """Which region an attach was given."""

    CREATED = "created"
    KEPT = "kept"  # of an engine that went, in whose place this one comes
    OFFERED = "offered"  # made elsewhere, handed in by the engine
    RESUMED = "resumed"  # the same engine came back to its own


class RegionDrop(StrEnum):
    """Why the node gave up a region whose engine is not there."""

    EXPIRED = "expired"  # nobody came for it in time
    MEMORY = "memory"  # a new region needed the memory
    DESCRIPTORS = "descriptors"  # a new session needed the file descriptors
    DESCRIPTORS_LOST = "descriptors_lost"  # the same, and the engine may live: it has the region still, and offers it
    UNPROVEN = "unproven"  # its engine was never seen, nor its lock; it may live as well
    NODE_CLOSED = "node_closed"


class Unfit(StrEnum):
    """Why an engine did not get the region that was kept for its group. It serves as a source of copies for as long as
    it is kept."""

    NUM_FRAMES = "num_frames"  # it has another number of frames
    IDENTITY = "identity"  # its pages are another model's, or laid out in another way


class Unpromoted(StrEnum):
    """Why a page read from one tier was not written to a faster one."""

    QUEUE_FULL = "queue_full"  # too many wait
    EXISTS = "exists"  # it was there already
    CHANGED = "changed"  # the engine used the frame for something else first
    NOT_ADMITTED = "not_admitted"  # not used often enough for that tier
    TIER = "tier"  # the tier did not take it; it counts why
    SESSION_ENDED = "session_ended"
    FAILED = "failed"  # the node's own code raised


class Undemoted(StrEnum):
    """Why a page that a tier gave up was not written to the tier below that takes such pages."""

    EXISTS = "exists"  # it was there already
    NOT_ADMITTED = "not_admitted"  # not used often enough
    QUEUE_FULL = "queue_full"  # too many bytes wait
    UNREADABLE = "unreadable"  # it could not be read, or is damaged
    TIER = "tier"  # the tier did not take it; it counts why
    DELETED = "deleted"  # somebody deleted it meanwhile
    NODE_CLOSED = "node_closed"  # it still waited when the node ended
    FAILED = "failed"  # the node's own code raised


class Verb(StrEnum):
    """What an op does."""

    LOOKUP = "lookup"
    PREFETCH = "prefetch"
    BACKUP = "backup"
    DELETE = "delete"


class ManagedVerb(StrEnum):
    """What a client of node-managed memory asks for, counted in pages."""

    PUT = "put"
    GET = "get"
    HOLD = "hold"
    CONTAINS = "contains"
    DELETE = "delete"
    CLEAR = "clear"
    USE = "use"  # pages that it has by itself, in front of those it asks for


class Direction(StrEnum):
    """What a tier was asked to do."""

    READ = "read"
    WRITE = "write"
    PROBE = "probe"
    DELETE = "delete"


class TierError(StrEnum):
    """What a tier raised instead of answering."""

    UNAVAILABLE = "unavailable"
    TIMEOUT = "timeout"
    FAILED = "failed"
    UNEXPECTED = "unexpected"  # not one of the storage tier's own errors: a bug in the backend


class PageDrop(StrEnum):
    """Why a page that was worth keeping went no further down, in an engine's cache. Counted in pages."""

    NO_FRAMES = "no_frames"  # no host frame could be had before it left the device, or after several tries
    COPY_FAILED = "copy_failed"  # the device-to-host copy failed as it left the device
    EVICTED_UNSTORED = "evicted_unstored"  # host memory was needed before it had reached storage
    BACKUP_FULL = "backup_full"  # too many nodes waited for their turn to be stored
    BACKUP_DECLINED = "backup_declined"  # the node did not take the op; it counts why
    BACKUP_NOT_ADMITTED = "backup_not_admitted"  # not used often enough for any storage tier
    BACKUP_FAILED = "backup_failed"  # the node could not store it; it counts why
    LOAD_FAILED = "load_failed"  # its host copy could not be loaded and is no longer trusted
    PARENT_LOST = "parent_lost"  # the page before it left the host, or never got there, while it was being copied
    SCOPE_CHANGED = "scope_changed"  # its request came before a reset, or before the files of its adapter changed


class Bypass(StrEnum):
    """Why no tier below the device keeps anything of a request, in an engine that manages its own device cache."""

    ADAPTER = "adapter"  # its adapter has no digest of its content
    INPUT = "input"  # an image or the like goes by a name that is no digest of its content
    STREAMING = "streaming"  # its prompt goes on growing and shrinking while it runs


class AskAgain(StrEnum):
    """What a request waits for that could not be told how much of it is cached."""

    STORAGE = "storage"  # its prefix is being read
    SHARED_LOAD = "shared_load"  # another request is loading the same pages: the device will have them
    STORE = "store"  # the next page is being copied to the host


class KeptFrame(StrEnum):
    """What became of a frame of a region that had pages before its engine started."""

    TAKEN_OVER = "taken_over"  # the next request that asks for its page has it
    DUPLICATE = "duplicate"  # another frame holds the same page; free
    UNFINISHED = "unfinished"  # its writer did not get to the end; free


class ClientFault(StrEnum):
    """What an engine met in its session with the node that should not happen. The engine goes on without."""

    SESSION_CLOSED = "session_closed"  # a call after the session had ended
    STRAY_EVENT = "stray_event"  # an event of an op, or of a page, that nobody waits for


class PrefetchEnd(StrEnum):
    """How the prefetch of one request ended, in an engine's cache. The first group never held a frame."""

    BELOW_THRESHOLD = "below_threshold"  # too few tokens are missing to be worth asking
    MISS = "miss"  # storage has none of them
    HIT_BELOW_THRESHOLD = "hit_below_threshold"  # storage has too few of them
    NO_FRAMES = "no_frames"  # not enough host frames could be had; tried again later
    ANCHOR_NOT_ON_HOST = "anchor_not_on_host"  # the prefix above has no host copy and none could be made
    DECLINED = "declined"  # the node did not take the op; it counts why
    SUPERSEDED = "superseded"  # the request was admitted, or its wait was over, before storage had answered

    COMPLETE = "complete"  # all that storage has of it arrived
    DEADLINE = "deadline"  # the time that the policy gives it was over first; what had arrived is used
    SILENT = "silent"  # nothing had come from the node for too long, whatever the policy; what had arrived is used
    NOT_WAITED = "not_waited"  # the request began first: best effort, or a try after a declined one; the same
    BAD_PAGE = "bad_page"  # a page could not be read; the pages before it are used
    ANCHOR_LOST = "anchor_lost"  # the prefix above lost its host copy meanwhile; what arrived was freed
    ABORTED = "aborted"  # the request ended first
