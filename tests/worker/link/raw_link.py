"""A router's connection to a worker's link port, whose frames a test writes and reads."""

from __future__ import annotations

import asyncio

from cluster.link.framing import FrameReader, to_frame
from cluster.protocol.link import LINK_VERSION, MIN_LINK_VERSION
from tests.harness.linked_worker import LinkedWorker
from wire import link_pb2

INCARNATION = 5


class RawLink:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter):
        self._reader, self.writer = reader, writer
        self._frames = FrameReader()
        self.came: list[link_pb2.WorkerFrame] = []
        self.ended = False
        self._reading = asyncio.get_running_loop().create_task(self._read())

    @classmethod
    async def open(cls, worker: LinkedWorker, serial: int = 1) -> RawLink:
        """Greeted, and not attached."""
        host, _, port = worker.address.rpartition(":")
        made = cls(*await asyncio.open_connection(host, int(port)))
        hello = link_pb2.LinkHello(
            min_version=MIN_LINK_VERSION,
            max_version=LINK_VERSION,
            router_id="r",
            incarnation=INCARNATION,
            serial=serial,
            worker_id=worker.worker_id,
            epoch=worker.epoch,
        )
        made.send(hello=hello)
        return made

    def send(self, **fields: object) -> None:
        self.writer.write(to_frame(link_pb2.RouterFrame(**fields)))  # type: ignore[arg-type]

    def attach(self) -> None:
        """A list of no handles."""
        self.send(attach_done=link_pb2.AttachDone(next_handle=1))

    async def beat(self, seconds: float, every: float = 0.1) -> None:
        """Beat for so long, or until the worker has closed the connection."""
        loop = asyncio.get_running_loop()
        ends = loop.time() + seconds
        while loop.time() < ends and not self.ended:
            self.send(beat=True)
            await asyncio.sleep(every)

    @property
    def notices(self) -> list[str]:
        return [link_pb2.LinkNotice.Name(frame.notice)[12:] for frame in self.came if frame.notice]

    async def _read(self) -> None:
        try:
            while data := await self._reader.read(1 << 16):
                self.came += map(link_pb2.WorkerFrame.FromString, self._frames.feed(data))
        except OSError:
            pass
        self.ended = True

    def close(self) -> None:
        self._reading.cancel()
        self.writer.close()
