"""A bound of the sizes that a reply announces, checked before its parser reserves memory for them.

hiredis reserves a list at once when it reads its header: thirteen bytes, `*2000000000`, take 16 GB, and freeing that list
takes the event loop a minute. It has no setting for it.
"""

from __future__ import annotations

import re
from typing import Any

import redis
from redis._parsers.hiredis import NOT_ENOUGH_DATA, _AsyncHiredisParser, _HiredisParser

MAX_ELEMENTS = 1 << 20  # of one reply, nested lists included: the registry of 200,000 workers
MAX_BULK_BYTES = 512 << 20  # Redis's own bound (proto-max-bulk-len)
# Small lists are not counted. In text that this project keeps in Redis no digits come before a carriage return. The
# expression begins with the rare character: each byte of each reply is searched.
_NUMBER_END = re.compile(rb"\r(?<=\d{4}\r)")
_HEADER = re.compile(rb"([*%~>|$=!])(\d{4,})\Z")
_LONGEST_HEADER = 24


class BoundedReader:
    """A hiredis reader that refuses to read larger replies."""

    def __init__(self, reader: Any, more: object):
        """`more`: what the reader returns while a reply is incomplete."""
        self._reader = reader
        self._more = more
        self._elements = 0  # of the reply that is incomplete
        self._end = b""  # of the data before: a header may be divided
        self.has_data = reader.has_data

    def feed(self, data: bytes | bytearray, *part: int) -> None:
        """Raises redis.InvalidResponse."""
        begin, size = part or (0, len(data))
        chunk = data if size == len(data) else data[begin : begin + size]
        searched, known = self._end + chunk, len(self._end)
        for end in _NUMBER_END.finditer(searched, known):
            if header := _HEADER.search(searched, max(0, end.start() - _LONGEST_HEADER), end.start()):
                self._count(*header.groups())
        self._end = searched[-_LONGEST_HEADER:]
        self._reader.feed(data, *part)

    def _count(self, kind: bytes, digits: bytes) -> None:
        if kind in b"$=!":
            if int(digits) > MAX_BULK_BYTES:
                raise redis.InvalidResponse(f"a reply with an element of more than {MAX_BULK_BYTES} bytes")
            return
        self._elements += int(digits)
        if self._elements > MAX_ELEMENTS:
            raise redis.InvalidResponse(f"a reply of more than {MAX_ELEMENTS} elements")

    def gets(self, *decode: bool) -> Any:
        reply = self._reader.gets(*decode)
        if reply is not self._more:
            self._elements = 0
        return reply


class BoundedParser(_HiredisParser):
    """A bounded parser for redis-py's blocking clients."""

    def on_connect(self, connection: Any, **options: Any) -> None:
        super().on_connect(connection, **options)  # type: ignore[no-untyped-call]
        self._reader: Any = BoundedReader(self._reader, NOT_ENOUGH_DATA)


class BoundedAsyncParser(_AsyncHiredisParser):
    """A bounded parser for redis-py's asyncio clients."""

    def on_connect(self, connection: Any) -> None:
        super().on_connect(connection)  # type: ignore[no-untyped-call]
        self._reader: Any = BoundedReader(self._reader, NOT_ENOUGH_DATA)
