"""A store client that speaks word by word, right or wrong."""

from cachesvc.client.greeting import greet, new_hello
from cachesvc.rpc import managed_pb2, store_codec
from cachesvc.rpc.framing import FrameReader, to_frame
from tests.fault.store.clients import KEYS
from tests.helpers.channels import connected, next_message
from tests.helpers.store_user import positions, request
from tests.oracles.pages import HANG_S

ToStore = managed_pb2.ToStore
PAGES_ASKED = {"keys": KEYS.tobytes(), "depths": positions(4).tobytes()}


class RawStore:
    """A store session that speaks word by word."""

    def __init__(self, path, before=None, **changes):
        """`before`: the Welcome of the session that this client had."""
        self.sock = connected(path)
        hello = new_hello()
        previous, boot_id = (before.session_id, before.boot_id) if before else (None, b"")
        hello.open_store.CopyFrom(store_codec.open_message(request(previous=previous, **changes), boot_id))
        greeted = greet(self.sock, hello, (), HANG_S)
        greeted.close_fds()
        self.welcome = greeted.welcome
        self.sock.settimeout(HANG_S)
        self._frames = FrameReader(1 << 30)

    def send(self, message):
        self.sock.sendall(message if isinstance(message, bytes) else to_frame(message))

    def receive(self):
        return next_message(self.sock, self._frames, managed_pb2.FromStore())

    def ask(self, message):
        self.send(message)
        return self.receive()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.sock.close()


def reserve(call, **changes):
    return ToStore(call=call, reserve=managed_pb2.Reserve(**{**PAGES_ASKED, **changes}))


def get(call, **changes):
    return ToStore(call=call, get=managed_pb2.Get(**{**PAGES_ASKED, **changes}))


def commit(call, reserved, written=b"\1\1\1\1"):
    return ToStore(call=call, commit=managed_pb2.Commit(reserved=reserved, written=written))


def contains(call, keys=KEYS):
    return ToStore(call=call, contains=managed_pb2.Contains(keys=keys.tobytes()))
