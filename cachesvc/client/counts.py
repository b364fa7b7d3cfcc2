"""What a client counts."""

from __future__ import annotations

from cachesvc.metrics import Registry
from cachesvc.outcomes import Decline, Reject, Verb


class ClientCounters:
    """What a client counts by itself, for when no node can be asked."""

    def __init__(self) -> None:
        self.registry = Registry()
        counter = self.registry.counter
        self.declined = counter(
            "cachesvc_client_declined_total",
            "Ops that the client declined itself, and lookups it answered with nothing",
            verb=[str(verb) for verb in Verb],
            reason=[str(reason) for reason in Decline],
        )
        self.lost = counter("cachesvc_client_connections_lost_total", "Connections to the node that ended")
        self.reconnects = counter("cachesvc_client_reconnects_total", "Sessions that were opened again")
        self.timeouts = counter("cachesvc_client_timeouts_total", "Calls that the node did not answer in time")
        self.errors = counter(
            "cachesvc_client_errors_total", "Messages that the node did not obey", reason=[str(item) for item in Reject]
        )
