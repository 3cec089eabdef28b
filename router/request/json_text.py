"""JSON that a client sends as a text within a field: arguments of calls, for example."""

from __future__ import annotations

from typing import Any

import orjson

from cluster.config.router import RequestLimits
from router.request.fields import refuse
from router.request.json_scan import SCAN_BYTES, JsonScan
from router.text import written_numbers

INVALID_JSON = (
    "INVALID_JSON"  # of an object that stands for a text which is none; coding agents know this name
)


class JsonTexts:
    """The texts of one request, which together have no more elements than a body may have."""

    def __init__(self, limits: RequestLimits):
        self._limits = limits
        self._elements = 0

    def object(self, text: str, field: str) -> dict[str, Any]:
        """Parse a JSON object. Raises InvalidRequestError naming `field`."""
        value = self._parsed(text, field, as_written=False)
        if not isinstance(value, dict):
            raise refuse(field, "must be the text of a JSON object")
        return value

    def arguments(self, text: str, field: str) -> dict[str, Any]:
        """Parse the arguments of an earlier call, whose numbers templates write as they are in `text`. What is no object,
        as where `max_tokens` cut it, is the one member of an object. Raises InvalidRequestError naming `field` if it
        exceeds a limit."""
        if not text:
            return {}
        value = self._parsed(text, field, as_written=True)
        return value if isinstance(value, dict) else {INVALID_JSON: text}

    def _parsed(self, text: str, field: str, *, as_written: bool) -> Any:
        """None: it is not valid JSON."""
        deepest, most = self._limits.max_json_depth, self._limits.max_json_elements
        raw, scan = text.encode(errors="surrogatepass"), JsonScan()
        while scan.seen < len(raw):  # other threads run between: of 8 MiB at once the lock is held for 0.2 s
            scan.read(raw[scan.seen : scan.seen + SCAN_BYTES])
            if scan.depth > deepest:
                raise refuse(field, f"nested deeper than {deepest} (max_json_depth)", deepest)
            if self._elements + scan.elements > most:
                which = "has, with the texts before it," if self._elements else "has"
                raise refuse(field, f"{which} more than {most} elements (max_json_elements)", most)
        self._elements += scan.elements
        try:
            value = written_numbers.loads(raw) if as_written else orjson.loads(raw)
        except orjson.JSONDecodeError as error:
            if written_numbers.is_too_large(error):
                raise refuse(field, "has a number that is too large for a float") from None
        except (ValueError, RecursionError):
            pass
        else:
            return value
        return None
