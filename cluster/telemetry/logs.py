"""Structured logs: one JSON object per line, with the request id where there is one."""

from __future__ import annotations

import logging
import sys
import time
from collections import Counter
from typing import TextIO

import orjson

MAX_SAME_PER_SECOND = 10


class JsonFormatter(logging.Formatter):
    def __init__(self, process: str):
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, object] = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
            + f".{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "process": self._process,
            "logger": record.name,
            "message": record.getMessage(),
        }
        request_id = getattr(record, "request_id", None)
        if request_id:
            line["request_id"] = request_id
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return orjson.dumps(line).decode()


def is_logged(count: int) -> bool:
    """Whether the `count`-th of events that a peer may cause without bound is logged: 1st, 2nd, 4th, 8th and so on."""
    return count & (count - 1) == 0


class RateBound(logging.Filter):
    """Limits each place in the code to ten lines per second, so that a fault in a loop does not fill a disk."""

    def __init__(self) -> None:
        super().__init__()
        self._second = 0
        self._counts: Counter[tuple[str, int]] = Counter()

    def filter(self, record: logging.LogRecord) -> bool:
        second = int(record.created)
        if second != self._second:
            self._second = second
            self._counts.clear()
        place = (record.pathname, record.lineno)
        self._counts[place] += 1
        return self._counts[place] <= MAX_SAME_PER_SECOND


def is_not_a_disconnect(record: logging.LogRecord) -> bool:
    """A filter that drops grpcio's error and traceback for a call whose peer disconnected while its answer was sent: it is
    counted as a cancelled request."""
    return not str(record.msg).startswith("ExecuteBatchError raised in core")


class LineHandler(logging.StreamHandler[TextIO]):
    """Begins a new line after a write that failed: a full disk may have taken a part of it."""

    def __init__(self, stream: TextIO):
        super().__init__(stream)
        self._torn = False

    def format(self, record: logging.LogRecord) -> str:
        begin, self._torn = "\n" if self._torn else "", False
        return begin + super().format(record)

    def handleError(self, record: logging.LogRecord) -> None:
        if isinstance(sys.exc_info()[1], OSError):
            self._torn = True
        else:
            super().handleError(record)


def configure(process: str) -> None:
    """Configure logging; called once by the process's main."""
    handler = LineHandler(sys.stderr)
    handler.setFormatter(JsonFormatter(process))
    handler.addFilter(is_not_a_disconnect)
    handler.addFilter(RateBound())
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)
