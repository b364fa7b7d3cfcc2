"""Sessions that are opened, and cannot be handed to a client."""

import errno
import os

import pytest

from cachesvc.client.base import AttachRequest
from cachesvc.client.greeting import new_hello
from cachesvc.daemon.engine_sessions import EngineOpener
from cachesvc.daemon.store_sessions import StoreOpener
from cachesvc.node.node import Node
from cachesvc.node.parts import NodeOptions
from cachesvc.node.sessions import NO_PEER
from cachesvc.rpc import codec, common_pb2, store_codec
from tests.helpers.store_user import request
from tests.oracles.pages import IDENTITY

ENGINE = AttachRequest(IDENTITY, "g", 8, IDENTITY.page_bytes())


def engine_hello():
    hello = new_hello()
    hello.attach.CopyFrom(codec.attach_message(ENGINE))
    return hello


def store_hello():
    hello = new_hello()
    hello.open_store.CopyFrom(store_codec.open_message(request(), b""))
    return hello


class Scarce:
    """So many more descriptors can be duplicated; those that were are remembered."""

    def __init__(self, number):
        self.number, self.made, self._dup = number, [], os.dup

    def __call__(self, fd):
        if len(self.made) == self.number:
            raise OSError(errno.EMFILE, "too many open files")
        self.made.append(self._dup(fd))
        return self.made[-1]


@pytest.mark.parametrize(
    ("opener", "hello", "number"),
    [
        *((EngineOpener, engine_hello, number) for number in range(3)),
        *((StoreOpener, store_hello, number) for number in range(2)),
    ],
)
def test_a_session_whose_descriptors_run_out_ends(opener, hello, number, monkeypatch):
    scarce = Scarce(number)
    with Node([], options=NodeOptions(managed_bytes=1 << 20)) as node:
        with monkeypatch.context() as patched:
            patched.setattr(os, "dup", scarce)
            with pytest.raises(OSError, match="too many open files"):
                opener(node, common_pb2.Limits()).open(hello(), (), NO_PEER)
        assert len(scarce.made) == number
        for fd in scarce.made:
            with pytest.raises(OSError, match="Bad file descriptor"):
                os.fstat(fd)
        node.tick()  # nobody ever held its memory
        assert not node.report().sessions
        assert not node.managed.num_sessions()
