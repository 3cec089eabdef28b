"""The messages of a chat."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import PlainValidator

from router.request.answer_parts import MAX_CALLED
from router.request.fields import Length, OnlyNeutral, RequestModel, read, refuse, wrong
from router.request.json_text import JsonTexts
from router.request.limits import FieldLimits
from router.request.tools import check_called
from router.text.contents import AskingRole, role_of
from router.text.tokenizer import INLINE_CHAT_CHARACTERS, MESSAGE_CHARACTERS

MAX_CALL_ID = 256  # characters


class TextPart(RequestModel):
    type: Literal["text"]
    text: str


class RefusalPart(RequestModel):
    type: Literal["refusal"]
    refusal: str


def _joined(value: object, kinds: Collection[str]) -> str:
    """The text of a content; its parts, each of which calls its text as its type, are joined."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise wrong("must be text")
    texts = []
    for part in value:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind not in kinds or not isinstance(part.get(kind), str):
            raise wrong("only text parts are supported")
        texts.append(part[kind])
    return "".join(texts)


def _content(value: object) -> str:
    return _joined(value, ("text",))


def _answer_content(value: object) -> str | None:
    return None if value is None else _joined(value, ("text", "refusal"))


Content: TypeAlias = Annotated[str, PlainValidator(_content, str | list[TextPart])]
AnswerContent: TypeAlias = Annotated[
    str | None, PlainValidator(_answer_content, str | list[TextPart | RefusalPart] | None)
]
CallId: TypeAlias = Annotated[str, Length(1, MAX_CALL_ID)]


class _Message(RequestModel):
    """Other fields, such as `refusal`, are ignored."""

    function_call: Annotated[Any, OnlyNeutral()] = None


class Message(_Message):
    role: AskingRole
    content: Content
    tool_calls: Annotated[Any, OnlyNeutral([])] = None


class CalledFunction(RequestModel):
    name: str
    arguments: str | None = None  # none: as an empty object


class ToolCall(RequestModel):
    id: CallId
    type: Literal["function"] | None = None
    function: CalledFunction
    objects = frozenset({"function"})


def _calls(value: object) -> list[Any] | None:
    """Read one by one: errors name the call."""
    if not isinstance(value, list | None):
        raise wrong("must be a list")
    return value


class AssistantMessage(_Message):
    role: Literal["assistant"]
    content: AnswerContent = None
    tool_calls: Annotated[list[Any] | None, PlainValidator(_calls, list[ToolCall] | None)] = None
    reasoning_content: str | None = None
    reasoning: str | None = None


class ToolMessage(_Message):
    role: Literal["tool"]
    content: Content
    tool_call_id: CallId
    name: Annotated[str, Length(1, MAX_CALLED)] | None = None


AnyMessage: TypeAlias = Message | AssistantMessage | ToolMessage
_MODELS: dict[str, type[AnyMessage]] = {"assistant": AssistantMessage, "tool": ToolMessage}


def read_messages(
    values: Sequence[object], limits: FieldLimits, field: str = "messages"
) -> list[dict[str, Any]]:
    """Messages as chat templates read them. Raises InvalidRequestError or UnsupportedFieldError naming the message and its
    field."""
    texts = JsonTexts(limits.settings)
    return [_read(one, f"{field}[{index}]", limits, texts) for index, one in enumerate(values)]


def _read(value: object, name: str, limits: FieldLimits, texts: JsonTexts) -> dict[str, Any]:
    if not isinstance(value, dict) or not isinstance(value.get("role"), str):
        raise refuse(name, "must be an object with a role")
    role = role_of(value["role"], f"{name}.role")
    message = read(_MODELS.get(role, Message), value, limits, name)
    made: dict[str, Any] = {"role": role, "content": message.content or ""}
    if isinstance(message, ToolMessage):
        made["tool_call_id"] = message.tool_call_id
        if message.name is not None:
            made["name"] = message.name
    elif isinstance(message, AssistantMessage):
        reasoning = message.reasoning if message.reasoning_content is None else message.reasoning_content
        if reasoning is not None:
            made["reasoning_content"] = reasoning
        if message.tool_calls:
            made["tool_calls"] = [
                _call(one, at, limits, texts)
                for one, at in (
                    (one, f"{name}.tool_calls[{index}]") for index, one in enumerate(message.tool_calls)
                )
            ]
    return made


def _call(value: object, name: str, limits: FieldLimits, texts: JsonTexts) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise refuse(name, "must be an object")
    call = read(ToolCall, value, limits, name)
    function = call.function
    return template_call(call.id, function.name, function.arguments or "", f"{name}.function", texts)


def template_call(call_id: str, name: str, arguments: str, field: str, texts: JsonTexts) -> dict[str, Any]:
    """A call of an assistant's message, with arguments as an object, as chat templates read it."""
    values = texts.arguments(arguments, f"{field}.arguments")
    function = {"name": check_called(name, f"{field}.name"), "arguments": values}
    return {"id": call_id, "type": "function", "function": function}


def chat_size(messages: Sequence[Any]) -> int:
    """Rendering cost of the messages, in characters, before they are read. Counting stops at the limit; values of a wrong
    type count as nothing."""
    size = MESSAGE_CHARACTERS * len(messages)
    for message in messages:
        if size > INLINE_CHAT_CHARACTERS:
            break
        if not isinstance(message, dict):
            continue
        for field in ("content", "reasoning_content", "reasoning"):
            value = message.get(field)
            size += content_size(value)
        size += _calls_size(message.get("tool_calls"))
    return size


def content_size(content: Any) -> int:
    """Rendering cost of a text or of a list of parts, in characters, before it is read."""
    if isinstance(content, str):
        return len(content)
    if not isinstance(content, list):
        return 0
    size = MESSAGE_CHARACTERS * len(content)
    if size <= INLINE_CHAT_CHARACTERS:
        # Whatever a part calls its text: `text`, `refusal`
        members = (value for part in content if isinstance(part, dict) for value in part.values())
        size += sum(len(value) for value in members if isinstance(value, str))
    return size


def _calls_size(calls: Any) -> int:
    if not isinstance(calls, list):
        return 0
    size = MESSAGE_CHARACTERS * len(calls)
    if size <= INLINE_CHAT_CHARACTERS:
        functions = (call.get("function") for call in calls if isinstance(call, dict))
        arguments = (one.get("arguments") for one in functions if isinstance(one, dict))
        size += sum(len(text) for text in arguments if isinstance(text, str))
    return size
