"""The messages of a chat, each a role and its text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import PlainValidator

from router.request.fields import OnlyNeutral, RequestModel, read, refuse, wrong
from router.request.limits import FieldLimits
from router.text.contents import AskingRole, role_of
from router.text.tokenizer import INLINE_CHAT_CHARACTERS, MESSAGE_CHARACTERS


class TextPart(RequestModel):
    type: Literal["text"]
    text: str


def _content(value: object) -> str:
    """The text of a content; its parts are joined."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise wrong("must be text")
    texts = []
    for part in value:
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise wrong("only text parts are supported")
        texts.append(part["text"])
    return "".join(texts)


Content: TypeAlias = Annotated[str, PlainValidator(_content, str | list[TextPart])]


class _Message(RequestModel):
    """Other fields, such as `name` and `refusal`, are ignored."""

    tool_calls: Annotated[Any, OnlyNeutral([])] = None
    function_call: Annotated[Any, OnlyNeutral()] = None


class Message(_Message):
    role: AskingRole
    content: Content


class AssistantMessage(_Message):
    role: Literal["assistant"]
    content: Content | None = None


AnyMessage: TypeAlias = Message | AssistantMessage


def read_messages(values: Sequence[object], limits: FieldLimits) -> list[dict[str, str]]:
    """Roles and texts. Raises InvalidRequestError or UnsupportedFieldError naming the message and its field."""
    return [_read(one, f"messages[{index}]", limits) for index, one in enumerate(values)]


def _read(value: object, name: str, limits: FieldLimits) -> dict[str, str]:
    if not isinstance(value, dict) or not isinstance(value.get("role"), str):
        raise refuse(name, "must be an object with a role")
    role = role_of(value["role"], f"{name}.role")
    model: type[AnyMessage] = AssistantMessage if role == "assistant" else Message
    return {"role": role, "content": read(model, value, limits, name).content or ""}


def chat_size(messages: Sequence[Any]) -> int:
    """Rendering cost of the messages, in characters, before they are read. Counting stops at the limit; values of a wrong
    type count as nothing."""
    size = MESSAGE_CHARACTERS * len(messages)
    for message in messages:
        if size > INLINE_CHAT_CHARACTERS:
            break
        content = message.get("content") if isinstance(message, dict) else None
        size += len(content) if isinstance(content, str) else _parts_size(content)
    return size


def _parts_size(content: Any) -> int:
    if not isinstance(content, list):
        return 0
    size = MESSAGE_CHARACTERS * len(content)
    if size <= INLINE_CHAT_CHARACTERS:
        texts = (part.get("text") for part in content if isinstance(part, dict))
        size += sum(len(text) for text in texts if isinstance(text, str))
    return size
