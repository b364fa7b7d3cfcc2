"""Networks of their own for processes: Linux network namespaces, joined by a bridge. Needs root and Debian's iproute2.

A process gets the network of the thread that starts it, so a test enters one for as long as it starts or asks something
there.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

_CLONE_NEWNET = 0x40000000
_LIBC = ctypes.CDLL(None, use_errno=True)
_SUBNET = "10.211.7"
HUB = f"{_SUBNET}.1"
"""The address of the network in the middle."""


class Networks:
    """A network in the middle, and one for each of `names` around it, which reach the middle and each other."""

    def __init__(self, names: Sequence[str]) -> None:
        assert shutil.which("ip"), "install the Debian package iproute2, or run: make test MARK='not system'"
        assert os.geteuid() == 0, "networks are made by root only; or run: make test MARK='not system'"
        self._mark = f"cs{os.getpid()}"
        self._names = names

    def __enter__(self) -> Networks:
        try:
            self._make()
        except BaseException:
            self._remove()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._remove()

    @contextmanager
    def inside(self, name: str = "hub") -> Iterator[None]:
        """This thread, and what it starts, is in that network."""
        with open("/proc/thread-self/ns/net") as before, open(f"/run/netns/{self._mark}-{name}") as there:
            _enter(there.fileno())
            try:
                yield
            finally:
                _enter(before.fileno())

    def cut(self, name: str) -> None:
        """Nothing reaches that network any more, nor comes out of it."""
        self._ip("-n", f"{self._mark}-hub", "link", "set", f"to-{name}", "down")

    def join(self, name: str) -> None:
        """It is as before."""
        self._ip("-n", f"{self._mark}-hub", "link", "set", f"to-{name}", "up")

    def _make(self) -> None:
        hub = f"{self._mark}-hub"
        self._ip("netns", "add", hub)
        self._ip("-n", hub, "link", "add", "bridge", "type", "bridge")
        self._ip("-n", hub, "address", "add", f"{HUB}/24", "dev", "bridge")
        for device in ("lo", "bridge"):
            self._ip("-n", hub, "link", "set", device, "up")
        for number, name in enumerate(self._names, start=2):
            outer = f"{self._mark}-{name}"
            self._ip("netns", "add", outer)
            self._ip("-n", hub, "link", "add", f"to-{name}", "type", "veth", "peer", "name", "out", "netns", outer)
            self._ip("-n", hub, "link", "set", f"to-{name}", "master", "bridge", "up")
            self._ip("-n", outer, "address", "add", f"{_SUBNET}.{number}/24", "dev", "out")
            for device in ("lo", "out"):
                self._ip("-n", outer, "link", "set", device, "up")

    def _remove(self) -> None:
        for name in ("hub", *self._names):
            if Path(f"/run/netns/{self._mark}-{name}").exists():
                self._ip("netns", "delete", f"{self._mark}-{name}")

    @staticmethod
    def _ip(*arguments: str) -> None:
        done = subprocess.run(["ip", *arguments], capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"ip {' '.join(arguments)}: {done.stderr}"


def _enter(network_fd: int) -> None:
    if _LIBC.setns(network_fd, _CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), "setns")
