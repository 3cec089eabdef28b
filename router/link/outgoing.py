"""Entries that a router sends over a link, collected in one turn of its event loop."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from cluster.link.framing import MAX_FRAME_BYTES
from cluster.protocol.link import FRAME_ENTRIES
from wire import link_pb2

MAX_CLOSES = 65536  # unsent; the worker ends handles beyond them by its timer once the link is gone
ATTACH_BYTES = MAX_FRAME_BYTES - 256  # of one frame, beside its length and AttachDone
ENTRY_BYTES = 4  # tag and length of an entry


class Outgoing:
    def __init__(self) -> None:
        self._credit: dict[tuple[int, int], int] = {}  # by handle and choice: the highest counts
        self._cancel: list[int] = []
        self._close: dict[int, None] = {}
        self._status: list[int] = []
        self._beat = False

    def credit(self, handle: int, choice: int, limit: int) -> None:
        self._credit[handle, choice] = limit

    def cancel(self, handle: int) -> None:
        self._cancel.append(handle)

    def close(self, handle: int) -> None:
        if len(self._close) < MAX_CLOSES:
            self._close[handle] = None

    def status(self, handle: int) -> None:
        self._status.append(handle)

    def beat(self) -> None:
        self._beat = True

    def clear(self) -> None:
        """Forget all entries: the next connection attaches the handles in use, which cancels all others."""
        for entries in (self._credit, self._cancel, self._close, self._status):
            entries.clear()
        self._beat = False

    def frames(self) -> Iterator[link_pb2.RouterFrame]:
        """Remove all entries and return their frames."""
        while self._credit or self._cancel or self._close or self._status or self._beat:
            frame = link_pb2.RouterFrame(beat=self._beat)
            self._beat = False
            left = FRAME_ENTRIES
            for field, waiting in ((frame.cancel, self._cancel), (frame.status, self._status)):
                field.extend(waiting[:left])
                taken = len(field)
                del waiting[:taken]
                left -= taken
            closed = list(self._close)[:left]
            frame.close.extend(closed)
            for handle in closed:
                del self._close[handle]
            left -= len(closed)
            for handle, choice in list(self._credit)[:left]:
                limit = self._credit.pop((handle, choice))
                frame.credit.add(handle=handle, choice=choice, limit=limit)
            yield frame


def attach_frames(
    attaches: Iterable[link_pb2.LinkAttach], next_handle: int
) -> Iterator[link_pb2.RouterFrame]:
    """The complete list of handles that the router reads, then AttachDone."""
    frame, size = link_pb2.RouterFrame(), 0
    for attach in attaches:
        own = attach.ByteSize() + ENTRY_BYTES
        if size and size + own > ATTACH_BYTES:
            yield frame
            frame, size = link_pb2.RouterFrame(), 0
        frame.attach.append(attach)
        size += own
    frame.attach_done.next_handle = next_handle
    yield frame
