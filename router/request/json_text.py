"""JSON that a client sends as a text within a field."""

from __future__ import annotations

from typing import Any

import orjson

from cluster.config.router import RequestLimits
from router.request.fields import refuse
from router.request.json_scan import JsonScan


def read_object(text: str, field: str, limits: RequestLimits) -> dict[str, Any]:
    """Parse a JSON object within the limits of a body. Raises InvalidRequestError naming `field`."""
    raw, scan = text.encode(errors="surrogatepass"), JsonScan()
    scan.read(raw)
    if scan.depth > limits.max_json_depth:
        raise refuse(field, f"nested deeper than {limits.max_json_depth}", limits.max_json_depth)
    if scan.elements > limits.max_json_elements:
        raise refuse(field, f"has more than {limits.max_json_elements} elements", limits.max_json_elements)
    try:
        value = orjson.loads(raw)
    except orjson.JSONDecodeError:
        value = None
    if not isinstance(value, dict):
        raise refuse(field, "must be the text of a JSON object")
    return value
