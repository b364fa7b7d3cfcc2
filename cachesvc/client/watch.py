"""One descriptor for an engine to watch, whatever becomes of the connection behind it."""

from __future__ import annotations

import contextlib
import os
import select

from cachesvc.client.link import Link


class Watch:
    """An epoll over at most one link and an eventfd. `raise_flag` may come from any thread, the rest from one."""

    def __init__(self) -> None:
        self._epoll = select.epoll()
        self._flag = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._epoll.register(self._flag, select.EPOLLIN)
        self._wants_writing = False
        self._may_be_up = False

    def fileno(self) -> int:
        """Readable while the link has something to read, or the flag is up; -1 after `close`."""
        return -1 if self._epoll.closed else self._epoll.fileno()

    def raise_flag(self) -> None:
        """There is something that needs no reading. Nothing after `close`."""
        flag = self._flag
        if flag >= 0:
            os.eventfd_write(flag, 1)
            self._may_be_up = True  # after the write: a flag that is up is never forgotten

    def lower_flag(self) -> None:
        """It has been taken."""
        if self._may_be_up:
            self._may_be_up = False
            with contextlib.suppress(BlockingIOError):  # lowered before
                os.eventfd_read(self._flag)

    def add(self, link: Link) -> None:
        """Watches this link too, until it is closed."""
        self._epoll.register(link.fileno(), select.EPOLLIN)
        self._wants_writing = False

    def update(self, link: Link) -> None:
        """Follows whether the link waits to be written to."""
        if link.is_writing != self._wants_writing:
            self._wants_writing = link.is_writing
            self._epoll.modify(link.fileno(), select.EPOLLIN | (select.EPOLLOUT if self._wants_writing else 0))

    def remove(self, link: Link) -> None:
        """Before the link is closed: a forked child may still have its socket."""
        self._epoll.unregister(link.fileno())

    def close(self) -> None:
        """Idempotent."""
        flag, self._flag = self._flag, -1
        if flag >= 0:
            self._epoll.close()
            os.close(flag)

    def __del__(self) -> None:
        self.close()  # of a client that never attached
