"""Whether the daemon can be found: its socket and the claim on it, looked at as time passes.

DESIGN. Open connections do not depend on the socket's name. When somebody removes it, the engines that are there go on,
and nobody new finds the daemon: so readiness says no until the name is back. It is made again under the claim's rules
(claim.py), and what cannot be made again is told with its reason.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from cachesvc.daemon.claim import Claim, SocketTaken
from cachesvc.daemon.health import Health

logger = logging.getLogger(__name__)


class SocketWatch:
    """One door's socket. `look` is called now and then by one thread; `trouble` may be read by any."""

    def __init__(
        self, name: str, claim: Claim, is_bound: Callable[[], bool], rebind: Callable[[], None], health: Health
    ) -> None:
        """`name` of the door, one of `WATCHED`; `health` is told. `is_bound`: whether what lies at the claim's path is
        the door's; `rebind` binds it again, where nothing is any more. OSError: it cannot."""
        self.trouble = ""
        """Why new clients do not find the door; empty while they do."""
        self._name = name
        self._claim = claim
        self._is_bound = is_bound
        self._rebind = rebind
        self._rebinds = health.rebinds
        health.add(lambda: self.trouble)

    def look(self) -> None:
        """Makes the socket again where it is gone. Never raises for what somebody did to it."""
        if self._claim.is_held() and self._is_bound():
            self.trouble = ""
            return
        path = self._claim.socket_path
        try:
            self._claim.renew()
            self._rebind()
        except (SocketTaken, OSError) as error:
            trouble = f"the {self._name}'s socket {path} is gone and cannot be made again: {error}"
            if trouble != self.trouble:
                logger.error("%s", trouble)
            self.trouble = trouble
        else:
            logger.warning("the %s's socket %s was removed under this daemon; bound again", self._name, path)
            self._rebinds.inc(1, self._name)
            self.trouble = ""
