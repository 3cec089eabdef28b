"""The identity of a router process in its links, and its counters of links and handles."""

from __future__ import annotations

import itertools
import secrets
import ssl

from cluster.faults.points import NO_FAULTS, Faults, Point
from cluster.security.tls import Peers
from router.link.handshakes import Handshakes


class RouterIdentity:
    """One per process start: handles and serials of links belong to its incarnation."""

    def __init__(self, router_id: str, faults: Faults = NO_FAULTS):
        self.router_id = router_id
        self.at_credit = faults.point(Point.LINK_CREDIT)
        self.at_attach = faults.point(Point.LINK_ATTACH)
        self.incarnation = secrets.randbits(64) or 1
        self._serials = itertools.count(1)
        self.handle_after = 1  # the number of the next handle
        self.unread = 0
        self.handshakes = Handshakes()
        self._tls: tuple[int, ssl.SSLContext | None] = (-1, None)

    def not_read(self) -> None:
        """Count an entry of an attempt that is not read any more."""
        self.unread += 1

    def next_serial(self) -> int:
        return next(self._serials)

    def next_handle(self) -> int:
        number, self.handle_after = self.handle_after, self.handle_after + 1
        return number

    def tls_context(self, peers: Peers) -> ssl.SSLContext | None:
        """The context for the present version of the certificate files."""
        version = peers.version
        if self._tls[0] != version:
            self._tls = version, peers.link_context()
        return self._tls[1]
