"""Earlier calls for chat templates that take one in a message: Llama 3's refuse several, gpt-oss's leaves out all but the
first.

    assistant [a, b], tool a, tool b    →    assistant [a], tool a, assistant [b], tool b
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from cluster.errors import InvalidRequestError

_NAMES = ("first_probe", "second_probe")
_IDS = ("probe0001", "probe0002")  # nine letters and digits: Mistral's templates take no others
_PROBE: list[Mapping[str, Any]] = [
    {"role": "user", "content": "a"},
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [
            {"id": call, "type": "function", "function": {"name": name, "arguments": {}}}
            for call, name in zip(_IDS, _NAMES, strict=True)
        ],
    },
    *({"role": "tool", "tool_call_id": call, "content": "b"} for call in _IDS),
]


def needs_single_calls(render: Callable[[Sequence[Mapping[str, Any]]], str]) -> bool:
    """Whether a template shows both of two calls only if each is in a message of its own. `render` raises
    InvalidRequestError for messages that the template refuses."""

    def shows_both(messages: Sequence[Mapping[str, Any]]) -> bool:
        try:
            text = render(messages)
        except (InvalidRequestError, RecursionError):
            return False
        return all(name in text for name in _NAMES)

    return not shows_both(_PROBE) and shows_both(with_single_calls(_PROBE))


def with_single_calls(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Each call in a message, followed by its results; content and reasoning are in the first one."""
    made: list[Mapping[str, Any]] = []
    place = 0
    while place < len(messages):
        message = messages[place]
        place += 1
        calls = message.get("tool_calls", ())
        if len(calls) < 2:
            made.append(message)
            continue
        begin = place
        while place < len(messages) and messages[place]["role"] == "tool":
            place += 1
        made += _apart(message, calls, messages[begin:place])
    return made


def _apart(
    message: Mapping[str, Any], calls: Sequence[Mapping[str, Any]], results: Sequence[Mapping[str, Any]]
) -> list[Mapping[str, Any]]:
    """Results that are of none of the calls follow the last one."""
    of_call: dict[Any, list[Mapping[str, Any]]] = {call["id"]: [] for call in calls}
    others: list[Mapping[str, Any]] = []
    for one in results:
        of_call.get(one.get("tool_call_id"), others).append(one)
    made: list[Mapping[str, Any]] = []
    for number, call in enumerate(calls):
        head: Mapping[str, Any] = {"role": "assistant", "content": ""} if number else message
        made += ({**head, "tool_calls": [call]}, *of_call.pop(call["id"], ()))
    return made + others
