"""The tools of a response: functions alone, in the form that chats have them.

Hosted tools (web_search, file_search, …) are refused by name: this server runs none.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import ConfigDict, Field, PlainValidator

from cluster.errors import UnsupportedFieldError
from router.request.fields import RequestModel, refuse, unsupported, wrong

MAX_SHOWN_TOOL = 64  # characters of a type in an error


class FunctionTool(RequestModel):
    model_config = ConfigDict(json_schema_extra={"title": "FunctionTool"})

    type: Literal["function"]
    name: str
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
    return kind[:MAX_SHOWN_TOOL] if isinstance(kind, str) else ""


def _tools(value: object) -> list[dict[str, Any]]:
    """Their types alone: the reader of a conversation's tools checks the rest."""
    if value is None:
        return []
    if not isinstance(value, list):
        raise wrong("must be a list")
    for index, tool in enumerate(value):
        name = f"tools[{index}]"
        if not _kind(tool):
            raise refuse(name, "must be an object with a type")
        if _kind(tool) != "function":
            text = "is not supported: this server runs no tools itself; define a function"
            raise UnsupportedFieldError(f"{name}.type: {_kind(tool)} {text}", field=f"{name}.type")
    return value


def _choice(value: object) -> Any:
    if value is None or value in ("none", "auto", "required"):
        return value
    match _kind(value):
        case "function" if isinstance(value, dict):
            if not isinstance(value.get("name"), str):
                raise wrong("its name must be a string")
            return value
        case "allowed_tools" if isinstance(value, dict):
            if value.get("mode") not in ("auto", "required"):
                raise wrong("its mode must be auto or required")
            tools = value.get("tools")
            if not isinstance(tools, list) or not tools:
                raise wrong("its tools must be a non-empty list")
            for tool in tools:
                if _kind(tool) != "function" or not isinstance(tool.get("name"), str):
                    raise unsupported("its tools must be functions, each with a name")
            return value
        case "":
            raise wrong("must be none, auto, required or an object with a type")
        case kind:
            raise unsupported(f"{kind} is not supported: this server runs no tools itself")


Tools: TypeAlias = Annotated[list[dict[str, Any]], PlainValidator(_tools, list[FunctionTool] | None)]
ToolChoice: TypeAlias = Annotated[
    Any,
    PlainValidator(_choice, Literal["none", "auto", "required"] | ChosenFunction | AllowedTools | None),
]


def chat_tools(tools: Sequence[dict[str, Any]], choice: Any) -> list[dict[str, Any]]:
    """The tools as a chat has them; with allowed tools, those alone."""
    if isinstance(choice, dict) and choice["type"] == "allowed_tools":
        allowed = {tool["name"] for tool in choice["tools"]}
        tools = [tool for tool in tools if tool.get("name") in allowed]
    return [
        {"type": "function", "function": {key: one for key, one in tool.items() if key != "type"}}
        for tool in tools
    ]


def chat_choice(choice: Any) -> Any:
    """The choice as a chat has it."""
    if not isinstance(choice, dict):
        return choice
    if choice["type"] == "allowed_tools":
        return choice["mode"]
    return {"type": "function", "function": {"name": choice["name"]}}
