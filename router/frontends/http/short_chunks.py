"""Bounds the short chunks and the trailers of a body. The parser calls for each of them, and 256 KiB, which are read at
once, hold 40,000: the event loop would do nothing else for a tenth of a second per connection."""

from __future__ import annotations

from collections.abc import Callable, Sized

from cluster.errors import InvalidRequestError

SHORT_BYTES = 256
MAX_SHORT_CHUNKS = 512


class ShortChunks:
    """Those of a request, and of the requests that wait with it: all of them may be read at once."""

    def __init__(self, pipeline: Sized, refuse: Callable[[int, InvalidRequestError], None]):
        self._pipeline = pipeline
        self._refuse = refuse
        self._count = 0

    def begin(self) -> None:
        """A head is complete, and its request waits in the pipeline if another one runs."""
        if not self._pipeline:
            self._count = 0

    def add(self, size: int = 0) -> None:
        """Count a chunk, or a trailer, behind others that were read with it."""
        self._count += size < SHORT_BYTES
        if self._count > MAX_SHORT_CHUNKS:
            text = (
                f"body: more than {MAX_SHORT_CHUNKS} trailers and chunks of less than {SHORT_BYTES} bytes; send longer "
                "chunks, or no chunks but a content-length"
            )
            self._refuse(400, InvalidRequestError(text, field="body", limit=str(MAX_SHORT_CHUNKS)))
