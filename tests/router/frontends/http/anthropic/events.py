"""A small request for a message, and the events of a streamed answer."""

from __future__ import annotations

import json
from typing import Any

ASK: dict[str, Any] = {"max_tokens": 5, "messages": [{"role": "user", "content": "hi"}]}


def events_of(frames: list[bytes]) -> list[dict[str, Any]]:
    events = []
    for frame in frames:
        name, data = frame.decode().removesuffix("\n\n").split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        events.append(event)
    return events
