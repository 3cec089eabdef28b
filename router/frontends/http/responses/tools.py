"""The tools of a response: functions alone, in the form that chats have them.

Hosted tools (web_search, file_search, …) are refused by name: this server runs none.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import ConfigDict, Field, PlainValidator, ValidationInfo

from cluster.errors import UnsupportedFieldError
from router.frontends.http.openai.requests import counted_tools
from router.request.fields import RequestModel, late, limits_of, refuse, unsupported, wrong
from router.request.limits import MAX_SHOWN, FieldLimits
from router.request.tools import (
    MAX_NAME,
    NAME,
    allowed_tools,
    check_count,
    check_named,
    check_tools,
    make_tool,
)
from router.text.conversation import Tool


class FunctionTool(RequestModel):
    model_config = ConfigDict(json_schema_extra={"title": "FunctionTool"})

    type: Literal["function"]
    name: Annotated[str, Field(pattern=f"^{NAME.pattern}$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = Field(None, description="the arguments of a call then match `parameters`")


class ChosenFunction(RequestModel):
    type: Literal["function"]
    name: str


class AllowedTools(RequestModel):
    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: list[dict[str, Any]]


def _kind(tool: object) -> str:
    kind = tool.get("type") if isinstance(tool, dict) else None
    return kind[:MAX_SHOWN] if isinstance(kind, str) else ""


def _tools(value: object, info: ValidationInfo) -> list[dict[str, Any]]:
    """Their types are checked too: each is read with the input."""
    tools = counted_tools(value, info)
    for index, tool in enumerate(tools):
        name = f"tools[{index}]"
        if not _kind(tool):
            raise refuse(name, "must be an object with a type")
        if _kind(tool) != "function":
            text = "is not supported: this server runs no tools itself; define a function"
            raise UnsupportedFieldError(f"{name}.type: {_kind(tool)} {text}", field=f"{name}.type")
    return tools


def _function(given: Mapping[str, Any]) -> dict[str, str]:
    """The choice of a function as the answer repeats it."""
    return {"type": "function", "name": given["name"][: MAX_NAME + 1]}


def _choice(value: object, info: ValidationInfo) -> Any:
    if value is None or value in ("none", "auto", "required"):
        return value
    match _kind(value):
        case "function" if isinstance(value, dict):
            if not isinstance(value.get("name"), str):
                raise wrong("its name must be a string")
            return _function(value)
        case "allowed_tools" if isinstance(value, dict):
            if value.get("mode") not in ("auto", "required"):
                raise wrong("its mode must be auto or required")
            tools = value.get("tools")
            if not isinstance(tools, list) or not tools:
                raise wrong("its tools must be a non-empty list")
            check_count(len(tools), limits_of(info), "tool_choice.tools")
            for tool in tools:
                if _kind(tool) != "function" or not isinstance(tool.get("name"), str):
                    raise unsupported("its tools must be functions, each with a name")
            return {"type": "allowed_tools", "mode": value["mode"], "tools": [*map(_function, tools)]}
        case "":
            raise wrong("must be none, auto, required or an object with a type")
        case kind:
            raise unsupported(f"{kind} is not supported: this server runs no tools itself")


Tools: TypeAlias = Annotated[
    list[dict[str, Any]],
    PlainValidator(_tools, Annotated[list[FunctionTool], late(maxItems="max_tools")] | None),
]
ToolChoice: TypeAlias = Annotated[
    Any,
    PlainValidator(_choice, Literal["none", "auto", "required"] | ChosenFunction | AllowedTools | None),
]


def read_tools(values: Sequence[dict[str, Any]], limits: FieldLimits) -> list[Tool]:
    """Raises InvalidRequestError naming the entry."""
    tools = [
        make_tool(
            one.get("name"),
            one.get("description"),
            one.get("parameters"),
            one.get("strict"),
            f"tools[{index}]",
        )
        for index, one in enumerate(values)
    ]
    check_tools(tools, limits)
    return tools


def read_choice(choice: Any, tools: Sequence[Tool]) -> tuple[Sequence[Tool], Any, str]:
    """The tools that are left, the choice among them, and the name of the one that must be called; "" = none. Raises
    InvalidRequestError."""
    if not isinstance(choice, dict):
        if choice == "required" and not tools:
            raise refuse("tool_choice", "required needs tools")
        return tools, choice or "auto", ""
    if choice["type"] == "function":
        return tools, "auto", check_named(choice["name"], tools, "tool_choice.name")
    names = ((one["name"], f"tool_choice.tools[{index}].name") for index, one in enumerate(choice["tools"]))
    return allowed_tools(names, tools), choice["mode"], ""
