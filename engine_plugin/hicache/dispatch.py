"""Which of a cache's parts an event of the node's is for."""

from __future__ import annotations

from cachesvc.node.events import Event, LookupDone, OpEnded, PagesRead, PagesStored
from engine_plugin.hicache.backup import Backup
from engine_plugin.hicache.reads import Reads


def dispatch(event: Event, reads: Reads, backup: Backup) -> None:
    """Hands it on."""
    match event:
        case PagesRead():
            reads.on_read(event)
        case PagesStored():
            backup.on_stored(event)
        case LookupDone():
            reads.on_lookup(event)
        case OpEnded(op, reason):
            if not reads.on_ended(op):
                backup.on_ended(op, reason)
