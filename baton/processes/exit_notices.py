"""`baton up`, the parent of prefill workers, notifies decode workers of their exits, which ends quarantines.

A notice is repeated until the decode worker acknowledges it or has ended; a stopped one gets it when it continues.
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
    """Never blocks: each `send` completes the calls of the previous one."""

    def __init__(self, peers: Peers) -> None:
        self._peers = peers
        self._notices: list[_Notice] = []

    @property
    def targets(self) -> set[str]:
        """Decode workers with an unacknowledged notice."""
        return {notice.target for notice in self._notices}

    def add(self, exited: str, targets: Iterable[str]) -> None:
        self._notices += [_Notice(target, exited) for target in targets]

    def send(self, addresses: Mapping[str, str]) -> None:
        """Send or repeat notices. `addresses`: those of live decode workers, by worker id."""
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
