"""Checks tools, the choice among them and the variables of chat templates, for every endpoint."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import orjson

from cluster.errors import InvalidRequestError
from router.request.answer_parts import MAX_CALLED, is_called
from router.request.fields import refuse, shown
from router.request.grammar.schema_walk import too_deep
from router.request.limits import FieldLimits
from router.text.conversation import Tool
from router.text.tokenizer import RESERVED_KWARGS

MAX_NAME = 128  # characters: as at Anthropic, twice what OpenAI allows
NAME = re.compile(rf"[a-zA-Z0-9_-]{{1,{MAX_NAME}}}")
MAX_KWARGS = 16
MAX_KWARG_NAME = 64  # characters
MAX_KWARG_CHARACTERS = 1024  # of a text


def check_name(name: object, field: str) -> str:
    """Raises InvalidRequestError unless it is the name of a function."""
    if not isinstance(name, str) or NAME.fullmatch(name) is None:
        text = f"{shown(name)} is not a name of 1 … {MAX_NAME} letters, digits, _ and -"
        raise refuse(field, text, NAME.pattern)
    return name


def check_called(name: str, field: str) -> str:
    """Raises InvalidRequestError unless a call of an answer may have had this name."""
    if not is_called(name):
        raise refuse(field, f"must have 1 … {MAX_CALLED} printable characters", MAX_CALLED)
    return name


def read_tools(values: object, limits: FieldLimits) -> list[Tool]:
    """OpenAI's list of tools, the field `tools`. Raises InvalidRequestError naming the entry.

    Depth and size of the values were bounded before they were parsed.
    """
    if not isinstance(values, list):
        raise refuse("tools", "must be a list")
    tools = [_read_tool(one, f"tools[{index}]") for index, one in enumerate(values)]
    check_tools(tools, limits)
    return tools


def _read_tool(value: object, field: str) -> Tool:
    function = value.get("function") if isinstance(value, dict) else None
    if not isinstance(value, dict) or value.get("type") != "function" or not isinstance(function, dict):
        raise refuse(field, 'must be {"type": "function", "function": {…}}')
    return make_tool(
        function.get("name"),
        function.get("description"),
        function.get("parameters"),
        function.get("strict"),
        f"{field}.function",
    )


def make_tool(name: object, description: object, parameters: object, strict: object, field: str) -> Tool:
    """A tool from values of the client. Raises InvalidRequestError."""
    if not isinstance(description, str | None):
        raise refuse(f"{field}.description", "must be a string")
    if not isinstance(parameters, dict | None):
        raise refuse(f"{field}.parameters", "must be a JSON schema: an object")
    if not isinstance(strict, bool | None):
        raise refuse(f"{field}.strict", "must be true or false")
    if parameters is not None and (reason := too_deep(parameters)) is not None:
        raise refuse(f"{field}.parameters", reason.message, reason.limit)
    return Tool(check_name(name, f"{field}.name"), description, parameters, bool(strict))


def check_tools(tools: Sequence[Tool], limits: FieldLimits, field: str = "tools") -> None:
    """Check count, size and names. Raises InvalidRequestError."""
    check_count(len(tools), limits, field)
    check_size((one.for_template() for one in tools), limits, field)
    names: set[str] = set()
    for one in tools:
        if one.name in names:
            raise refuse(field, f"two have the name {one.name}")
        names.add(one.name)


def check_count(count: int, limits: FieldLimits, field: str = "tools") -> None:
    most = limits.settings.max_tools
    if count > most:
        raise refuse(field, f"at most {most} are allowed (max_tools)", most)


def tools_size(tools: Sequence[Any]) -> int:
    """The cost of rendering tools that were measured, in characters."""
    return sum(len(orjson.dumps(one)) for one in tools)


def check_size(tools: Iterable[Any], limits: FieldLimits, field: str = "tools") -> None:
    """Raises InvalidRequestError if the tools, as JSON, have more than `max_tool_bytes`."""
    most, size = limits.settings.max_tool_bytes, 0
    for one in tools:
        try:
            size += len(orjson.dumps(one))
        except TypeError:
            raise refuse(field, "hold a value that JSON does not have") from None
        if size > most:
            raise refuse(field, f"more than {most} bytes (max_tool_bytes)", most)


def read_choice(
    value: object, tools: Sequence[Tool], field: str = "tool_choice"
) -> tuple[Sequence[Tool], Any, str]:
    """The tools that are left, the choice among them, and the name of the one that must be called; "" = none. Raises
    InvalidRequestError."""
    if value is None:
        return tools, "auto", ""
    if isinstance(value, str):
        if value not in ("none", "auto", "required"):
            raise refuse(field, "must be none, auto, required, or an object that names functions")
        if value == "required" and not tools:
            raise refuse(field, "required needs tools")
        return tools, value, ""
    kind = value.get("type") if isinstance(value, dict) else None
    if kind == "allowed_tools" and isinstance(value, dict):
        allowed, mode = _read_allowed(value.get("allowed_tools"), tools, f"{field}.allowed_tools")
        return allowed, mode, ""
    function = value.get("function") if kind == "function" and isinstance(value, dict) else None
    if not isinstance(function, dict):
        raise refuse(
            field, 'must be {"type": "function", "function": {"name": …}} or of the type allowed_tools'
        )
    return tools, "auto", check_named(function.get("name"), tools, f"{field}.function.name")


def _read_allowed(value: object, tools: Sequence[Tool], field: str) -> tuple[list[Tool], str]:
    """OpenAI's choice among some of the tools, and its mode."""
    if not isinstance(value, dict):
        raise refuse(field, 'must be {"mode": …, "tools": […]}')
    mode, entries = value.get("mode"), value.get("tools")
    if mode not in ("auto", "required"):
        raise refuse(f"{field}.mode", "must be auto or required")
    if not isinstance(entries, list) or not entries:
        raise refuse(f"{field}.tools", "must be a non-empty list")
    if len(entries) > len(tools):
        raise refuse(f"{field}.tools", f"more than the {len(tools)} tools of the request", len(tools))
    functions = [one.get("function") if isinstance(one, dict) else None for one in entries]
    return allowed_tools(
        [
            (one.get("name") if isinstance(one, dict) else None, f"{field}.tools[{index}].function.name")
            for index, one in enumerate(functions)
        ],
        tools,
    ), mode


def allowed_tools(names: Iterable[tuple[object, str]], tools: Sequence[Tool]) -> list[Tool]:
    """The tools of these names, each of which has the field that an error names. Raises InvalidRequestError."""
    allowed = {check_named(name, tools, field) for name, field in names}
    return [replace(one, place=index) for index, one in enumerate(tools) if one.name in allowed]


def check_named(name: object, tools: Sequence[Tool], field: str) -> str:
    """Raises InvalidRequestError unless one of the tools has the name."""
    if not any(one.name == name for one in tools):
        raise refuse(field, f"{shown(name)} is none of the request's tools")
    assert isinstance(name, str)
    return name


def check_kwargs(values: object, field: str = "chat_template_kwargs") -> dict[str, Any]:
    """Variables of the chat template: plain values. Raises InvalidRequestError."""
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise refuse(field, "must be an object")
    if len(values) > MAX_KWARGS:
        raise refuse(field, f"at most {MAX_KWARGS} entries are allowed", MAX_KWARGS)
    for name, value in values.items():
        if not isinstance(name, str) or len(name) > MAX_KWARG_NAME or not name.isidentifier():
            raise refuse(
                field, f"{shown(name)} is not the name of a variable, of at most {MAX_KWARG_NAME} characters"
            )
        if name in RESERVED_KWARGS:
            raise InvalidRequestError(f"{field}: {name} is reserved", field=f"{field}.{name}")
        if not isinstance(value, str | int | float | None):
            raise refuse(f"{field}.{name}", "must be a string, a number, true, false or null")
        if isinstance(value, str) and len(value) > MAX_KWARG_CHARACTERS:
            most = MAX_KWARG_CHARACTERS
            raise refuse(f"{field}.{name}", f"at most {most} characters are allowed", most)
    return values
