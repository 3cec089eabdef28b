"""Bounds the short chunks and the trailers of a body. The parser calls for each of them, and 128 KiB, which are read in
one turn of a body that its endpoint has not taken, hold 20,000: the event loop would do nothing else for 0.05 s."""

from __future__ import annotations

from collections.abc import Callable, Sized

from cluster.errors import InvalidRequestError

SHORT_BYTES = 256
MAX_SHORT_CHUNKS = 512


class ShortChunks:
    """Counts the short chunks of a request, and of the requests that wait with it: all of them may be read at once."""

    def __init__(self, pipeline: Sized, refuse: Callable[[int, InvalidRequestError], None]):
        self._pipeline = pipeline
        self._refuse = refuse
        self._count = 0
        self._begins = False  # the next piece of a body is no rest of a chunk whose beginning was read before
        self._last: int | None = None  # bytes of a piece that began so, and may be cut where the read ends

    def read(self) -> None:
        """Further bytes were received."""
        self._begins, self._last = False, None

    def begin(self) -> None:
        """A head is complete, and its request waits in the pipeline if another one runs."""
        self._begins, self._last = True, None
        if not self._pipeline:
            self._count = 0

    def add_piece(self, size: int) -> None:
        """A piece of a body. It is a chunk, and counts, if the read has one, or the head, before it and one after it."""
        if self._last is not None:
            self._add(self._last)
        self._begins, self._last = True, size if self._begins else None

    def add_trailer(self) -> None:
        self._add(0)

    def _add(self, size: int) -> None:
        self._count += size < SHORT_BYTES
        if self._count > MAX_SHORT_CHUNKS:
            text = (
                f"body: more than {MAX_SHORT_CHUNKS} trailers and chunks of less than {SHORT_BYTES} bytes; send longer "
                "chunks, or no chunks but a content-length"
            )
            self._refuse(400, InvalidRequestError(text, field="body", limit=str(MAX_SHORT_CHUNKS)))
