"""The way from an engine to its node: which one, who starts it, and what happens when it is not there.

LinkFailed (ValueError)   the node cannot be what the configuration says; the message is for the operator
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from dataclasses import replace

from cachekernels.region import Region

from cachesvc.client.base import Attachment, AttachRefused, AttachRequest, CacheClient, NodeAway
from cachesvc.client.channel import ChannelClient
from cachesvc.client.connect import default_socket_path, dial_of
from cachesvc.client.greeting import Dial
from cachesvc.client.private import PrivateNode, TiersRefused
from cachesvc.daemon.summary import size
from cachesvc.outcomes import AttachResult
from engine_plugin.hicache.config import AUTO, PRIVATE, UNIX, CacheConfig

log = logging.getLogger(__name__)

LATER = frozenset(
    {
        AttachResult.REFUSED_DRAINING,
        AttachResult.REFUSED_BUSY,
        AttachResult.REFUSED_CONNECTIONS,
        AttachResult.REFUSED_DESCRIPTORS,
    }
)
"""Refusals that pass by themselves."""


class LinkFailed(ValueError):
    """No node can be had as configured."""


class NodeLink(ABC):
    """A client, and what stands behind it."""

    client: CacheClient

    @abstractmethod
    def attach(self, request: AttachRequest) -> Attachment:
        """Opens the session. AttachRefused: this engine may not have what it asks for. Blocks while memory is
        cleared."""

    @abstractmethod
    def close(self) -> None:
        """Ends the session, and the node if it is ours. Bounded. Idempotent."""

    @abstractmethod
    def describe(self) -> list[str]:
        """For a person, at the start."""


def attach_if_useful(link: NodeLink, request: AttachRequest) -> Attachment | None:
    """What `link` grants. None, with a warning, and the link closed: its node is of no use to this engine. The link is
    closed too before AttachRefused, LinkFailed or RegionTooLarge: what the operator asked for cannot be had."""
    try:
        attachment = link.attach(request)
        if attachment.enabled:
            return attachment
        why = attachment.warning
    except AttachRefused as refused:
        if refused.result is not AttachResult.REFUSED_VERSION:
            link.close()
            raise
        why = str(refused)
    except BaseException:
        link.close()
        raise
    log.warning("only the device caches: %s", why)
    link.close()
    return None


def open_link(config: CacheConfig) -> NodeLink:
    """The link that `config.node_address` names. LinkFailed, PrivateNodeFailed."""
    dial = dial_of(config.node_address)
    if dial is None:
        return PrivateLink(config)
    address = f"{UNIX}{default_socket_path()}" if config.node_address == AUTO else config.node_address
    if config.storage_backend is not None:
        raise LinkFailed(
            f"the daemon at {address} has storage of its own, configured with it: leave {config.storage_backend!r} "
            f"out, or ask for a node of this engine's own with address {PRIVATE}"
        )
    return DaemonLink(address, dial, config.group)


class DaemonLink(NodeLink):
    """A node that others use too, which may come and go."""

    def __init__(self, address: str, dial: Dial, group: str) -> None:
        self._address = address
        self._group = group
        self.client = ChannelClient(dial)

    def attach(self, request: AttachRequest) -> Attachment:
        """Where nobody answers, the host memory is our own until somebody does. RegionTooLarge then."""
        try:
            return self.client.attach(request)
        except NodeAway as away:
            reason = str(away)
        except AttachRefused as refused:
            if refused.result not in LATER:
                raise
            reason = str(refused)
        log.warning(
            "no node at %s (%s): host memory of our own for now, no storage; a node that appears is offered it",
            *(self._address, reason),
        )
        region = Region.create(request.num_frames, request.frame_bytes)
        return self.client.attach(replace(request, offer=region))

    def close(self) -> None:
        self.client.detach()

    def describe(self) -> list[str]:
        return [f"node     {self._address}, group {self._group}"]


class PrivateLink(NodeLink):
    """A node of this engine's own, with the storage of its flags. PrivateNodeFailed: there can be none on this machine
    now. LinkFailed: there can be none with this storage."""

    def __init__(self, config: CacheConfig) -> None:
        self._prefetch_policy = config.prefetch_policy
        try:
            self._node = PrivateNode.started(config.storage_backend, config.storage_config)
        except TiersRefused as error:
            raise LinkFailed(str(error)) from error
        try:
            self.client = ChannelClient(self._node.dial)
        except OSError:  # no more descriptors
            self._node.close()
            raise

    def attach(self, request: AttachRequest) -> Attachment:
        """LinkFailed: there is a tier that could never take a page."""
        for tier in self._node.tiers:
            if not tier.has_room_for(request.frame_bytes):
                raise LinkFailed(
                    f"storage {tier.name}: {size(tier.capacity_bytes or 0)} are smaller than one page of "
                    f"{request.frame_bytes} bytes with its header; raise capacity_bytes"
                )
        return self.client.attach(request)

    def close(self) -> None:
        self._node.start_no_more()  # the client may be waiting for one
        self.client.detach()
        self._node.close()

    def describe(self) -> list[str]:
        lines = [f"node     process {self._node.pid}, of this engine's own"]
        for tier in self._node.tiers:
            limit = f"at most {size(tier.capacity_bytes)}" if tier.capacity_bytes else tier.bounded_by or "unlimited"
            where = f" at {tier.place}" if tier.place else ""
            lines.append(f"storage  {tier.name}{where}, {limit}, prefetch {self._prefetch_policy}")
        return lines
