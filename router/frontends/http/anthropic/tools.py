"""The tools of a request and the choice among them, as every endpoint hands them on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import ConfigDict, Field, PlainValidator

from cluster.errors import InvalidRequestError, UnsupportedFieldError
from router.frontends.http.openai.requests import counted_tools
from router.request.fields import RequestModel, read, refuse
from router.request.limits import MAX_SHOWN, FieldLimits
from router.request.tools import check_named, check_tools, make_tool
from router.text.conversation import Tool


class ToolParam(RequestModel):
    """Other fields, such as `cache_control`, change nothing."""

    model_config = ConfigDict(json_schema_extra={"title": "ToolParam"})

    type: Literal["custom"] | None = None
    name: str
    description: str | None = None
    input_schema: dict[str, Any]
    strict: bool | None = Field(None, description="the input of every call then matches input_schema")


class ToolChoiceParam(RequestModel):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = Field(None, description="of the tool, with type = tool")
    disable_parallel_tool_use: bool | None = Field(None, description="at most one call")


Tools: TypeAlias = Annotated[list[Any], PlainValidator(counted_tools, list[ToolParam] | None)]


def read_tools(values: Sequence[object], limits: FieldLimits) -> list[Tool]:
    """Raises InvalidRequestError naming the tool and its field."""
    tools = [_tool(value, f"tools.{index}", limits) for index, value in enumerate(values)]
    check_tools(tools, limits)
    return tools


def _tool(value: object, name: str, limits: FieldLimits) -> Tool:
    kind = value.get("type") if isinstance(value, dict) else None
    if isinstance(kind, str) and kind != "custom":
        text = "is not supported: this server runs no tools itself; define a tool with an input_schema"
        raise UnsupportedFieldError(f"{name}.type: {kind[:MAX_SHOWN]} {text}", field=f"{name}.type")
    tool = read(ToolParam, value, limits, name)
    try:
        return make_tool(tool.name, tool.description, tool.input_schema, tool.strict, name)
    except InvalidRequestError as error:
        there, here = f"{name}.parameters", f"{name}.input_schema"
        if not error.field.startswith(there):
            raise
        raise refuse(here, error.message.removeprefix(f"{there}: "), error.limit) from error


def check_choice(choice: ToolChoiceParam | None, tools: Sequence[Tool]) -> str:
    """The name of the tool that must be called; "" = none. Raises InvalidRequestError."""
    if choice is None:
        return ""
    if choice.type == "any" and not tools:
        raise refuse("tool_choice.type", "any needs tools")
    if choice.type != "tool":
        return ""
    return check_named(choice.name, tools, "tool_choice.name")
