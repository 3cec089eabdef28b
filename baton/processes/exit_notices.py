"""`baton up` is the parent of prefill workers: its word that one has exited ends quarantines at decode workers.

A notice is repeated until the decode worker has taken it or is gone itself: a stopped one hears it when it wakes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import grpc

from cluster.security.tls import Peers
from wire import decode_pb2, decode_pb2_grpc

CALL_SECONDS = 2.0


@dataclass
class _Notice:
    target: str
    exited: str
    call: grpc.Future[decode_pb2.PeerExitedResponse] | None = None
    channel: grpc.Channel | None = None

    def end(self) -> None:
        if self.channel is not None:
            self.channel.close()
        self.call = self.channel = None


class ExitNotices:
    """Never waits: every `send` looks after the calls of the one before."""

    def __init__(self, peers: Peers) -> None:
        self._peers = peers
        self._notices: list[_Notice] = []

    @property
    def targets(self) -> set[str]:
        """Decode workers that have a notice still to take."""
        return {notice.target for notice in self._notices}

    def add(self, exited: str, targets: Iterable[str]) -> None:
        self._notices += [_Notice(target, exited) for target in targets]

    def send(self, addresses: Mapping[str, str]) -> None:
        """`addresses` of the decode workers that live, by worker id."""
        waiting: list[_Notice] = []
        for notice in self._notices:
            delivered = notice.call is not None and notice.call.done() and notice.call.exception() is None
            if delivered or notice.target not in addresses:
                notice.end()
                continue
            if notice.call is None or notice.call.done():
                notice.end()
                self._call(notice, addresses[notice.target])
            waiting.append(notice)
        self._notices = waiting

    def _call(self, notice: _Notice, address: str) -> None:
        notice.channel = self._peers.blocking_channel(address)
        stub = decode_pb2_grpc.DecodeStub(notice.channel)
        request = decode_pb2.PeerExitedRequest(worker_id=notice.exited)
        notice.call = stub.PeerExited.future(request, timeout=CALL_SECONDS)

    def close(self) -> None:
        for notice in self._notices:
            notice.end()
        self._notices = []
