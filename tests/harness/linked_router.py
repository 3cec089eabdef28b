"""The router's end of a link in the worker's own process, without a connection: what attempts send is read at once."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from dataclasses import dataclass

from cluster.link.framing import FrameReader, to_frame
from cluster.protocol.link import MIN_LINK_VERSION, WINDOW_TOKENS
from wire import common_pb2, link_pb2
from worker.link.routers import Routers
from worker.link.session import Session


@dataclass
class Facts:
    worker_id: str = "d"
    epoch: int = 1


class LinkedRouter:
    """Grants credit for every token that came, and closes handles that have ended. `reads`: False leaves both undone."""

    def __init__(self, routers: Routers, *, reads: bool = True):
        self.tokens: dict[int, list[common_pb2.Token]] = defaultdict(list)
        self.ends: dict[int, common_pb2.AttemptEnd] = {}
        self.cancelled: list[int] = []
        self.reads = reads
        self._frames = FrameReader()
        self._scheduled = False
        self._number = 0
        facts = Facts()
        self._session = Session(routers, facts, self, lambda: 1)
        hello = link_pb2.LinkHello(
            min_version=MIN_LINK_VERSION,
            max_version=MIN_LINK_VERSION,  # each choice has a whole window: it has no need of an attempt's number of them
            router_id="r",
            incarnation=1,
            serial=1,
            worker_id=facts.worker_id,
            epoch=facts.epoch,
        )
        self.send(link_pb2.RouterFrame(hello=hello))
        self.send(link_pb2.RouterFrame(attach_done=link_pb2.AttachDone(next_handle=0)))

    def handle(self) -> common_pb2.HandleRef:
        self._number += 1
        return common_pb2.HandleRef(incarnation=1, number=self._number)

    def send(self, frame: link_pb2.RouterFrame) -> None:
        self._session.received(to_frame(frame))
        while self._session.read():
            pass

    def break_off(self) -> None:
        self._session.closed()

    # --- worker.link.session.FrameTransport ----------------------------------------------------------------

    def write(self, frame: bytes) -> None:
        for message in self._frames.feed(frame):
            self._take(link_pb2.WorkerFrame.FromString(message))

    def close(self) -> None:
        """Nothing is open."""

    def schedule(self) -> None:
        if not self._scheduled:
            self._scheduled = True
            asyncio.get_running_loop().call_soon(self._flush)

    # -------------------------------------------------------------------------------------------------------

    def _flush(self) -> None:
        self._scheduled = False
        self._session.flush()

    def _take(self, frame: link_pb2.WorkerFrame) -> None:
        answer = link_pb2.RouterFrame()
        columns = frame.tokens
        came = [
            (number, common_pb2.Token(choice=choice, position=position, token_id=token_id))
            for number, choice, position, token_id in zip(
                columns.handle, columns.choice, columns.position, columns.token_id, strict=True
            )
        ]
        for number, token in [*came, *((extra.handle, extra.token) for extra in frame.extras)]:
            self.tokens[number].append(token)
            limit = token.position + 1 + WINDOW_TOKENS
            answer.credit.add(handle=number, choice=token.choice, limit=limit)
        for end in frame.ends:
            self.ends[end.handle] = end.end
            answer.close.append(end.handle)
        self.cancelled += frame.cancelled
        if self.reads and (answer.credit or answer.close):
            asyncio.get_running_loop().call_soon(self.send, answer)
