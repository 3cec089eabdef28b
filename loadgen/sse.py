"""Server-sent events, as far as OpenAI's API uses them: `data:` lines, one event each."""

from __future__ import annotations


class SseDecoder:
    """Bytes in, payloads out. Events may be split anywhere, and several may come in one piece."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[bytes]:
        """The payloads of the `data:` lines that are now whole."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        return [line[5:].strip() for line in lines if line.startswith(b"data:")]
