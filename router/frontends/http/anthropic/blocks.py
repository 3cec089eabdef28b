"""The messages of Anthropic's clients, as those of a chat.

    system, and messages of the role system   a system's message
    text                                      the message's content; texts are joined by a line break
    tool_result                               a tool's message
    thinking, text, tool_use                  one message of the assistant

Consecutive messages of one role are one turn. Images, documents and the blocks of server tools are refused by name.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal, NoReturn, TypeAlias

import orjson
from pydantic import PlainValidator

from cluster.errors import UnsupportedFieldError
from router.request.fields import Length, RequestModel, read, refuse, text_or_list
from router.request.limits import MAX_SHOWN, FieldLimits
from router.request.tools import check_called
from router.text import written_numbers
from router.text.tokenizer import INLINE_CHAT_CHARACTERS, MESSAGE_CHARACTERS

MAX_ID = 256  # characters of a tool_use's id
BETWEEN = "\n"  # texts of one turn
MEMBER_CHARACTERS = 16  # cost of a member of a list or an object beside its text
ChatMessage: TypeAlias = dict[str, Any]
Id: TypeAlias = Annotated[str, Length(1, MAX_ID)]


class TextBlock(RequestModel):
    """Other fields, such as `cache_control` and `citations`, change nothing; so do those of the other blocks."""

    type: Literal["text"]
    text: str


class ThinkingBlock(RequestModel):
    type: Literal["thinking"]
    thinking: str
    signature: str | None = None


class RedactedThinkingBlock(RequestModel):
    type: Literal["redacted_thinking"]
    data: str | None = None


class ToolUseBlock(RequestModel):
    type: Literal["tool_use"]
    id: Id
    name: str
    input: dict[str, Any]


Texts: TypeAlias = Annotated[Any, PlainValidator(text_or_list("blocks"), str | list[TextBlock])]


class ToolResultBlock(RequestModel):
    type: Literal["tool_result"]
    tool_use_id: Id
    content: Texts | None = None
    is_error: bool | None = None


AnyBlock: TypeAlias = TextBlock | ThinkingBlock | RedactedThinkingBlock | ToolUseBlock | ToolResultBlock
Blocks: TypeAlias = Annotated[Any, PlainValidator(text_or_list("blocks"), str | list[AnyBlock])]


class MessageParam(RequestModel):
    role: Literal["user", "assistant", "system"]
    content: Blocks


class WrittenInputs:
    """The inputs of calls, with numbers as they are in the body's text. It is parsed again, at most once, where an input
    has numbers that may have been written in another way."""

    def __init__(self, text: bytes | bytearray = b""):
        """Empty: inputs stay as they were parsed."""
        self._text = text
        self._body: Any = None
        self._has_minus_zero: bool | None = None  # looked for once, as a body may have thousands of inputs

    def at(self, block: str, value: dict[str, Any]) -> dict[str, Any]:
        """`block`: the path of the tool_use; `value`: its input, as it was parsed."""
        if not self._text or not self._differs(orjson.dumps(value)):
            return value
        if self._body is None:
            self._body = written_numbers.loads(self._text)
        found = self._body
        for part in block.split("."):
            found = found[int(part) if isinstance(found, list) else part]
        return written_numbers.WithWrittenNumbers(found["input"])

    def _differs(self, parsed: bytes) -> bool:
        if written_numbers.may_differ(parsed):
            return True
        if not written_numbers.may_have_zero(parsed):  # orjson writes -0 so too
            return False
        if self._has_minus_zero is None:
            self._has_minus_zero = written_numbers.may_have_minus_zero(self._text)
        return self._has_minus_zero


def read_messages(
    values: Sequence[object],
    system: str | Sequence[object] | None,
    limits: FieldLimits,
    inputs: WrittenInputs | None = None,
) -> list[ChatMessage]:
    """The messages of a chat. Raises InvalidRequestError or UnsupportedFieldError naming the block and its field."""
    reader = _Reader(limits, inputs or WrittenInputs())
    if system:
        reader.system(system, "system")
    for index, value in enumerate(values):
        name = f"messages.{index}"
        message = read(MessageParam, value, limits, name)
        match message.role:
            case "system":
                reader.system(message.content, f"{name}.content")
            case "user":
                reader.user(message.content, f"{name}.content")
            case "assistant":
                reader.assistant(message.content, f"{name}.content")
    reader.check_end()
    return [_joined(message) for message in reader.messages]


class _Reader:
    def __init__(self, limits: FieldLimits, inputs: WrittenInputs):
        self.messages: list[ChatMessage] = []
        self._limits, self._inputs = limits, inputs
        self._calls: dict[str, str] = {}  # names of tools, by tool_use
        self._unanswered: dict[str, str] = {}  # the places of calls without a result

    def system(self, content: str | Sequence[object], name: str) -> None:
        message = self._turn("system")
        for text in self._texts(content, name):
            _append(message, "content", text)

    def user(self, content: str | Sequence[object], name: str) -> None:
        if not content:
            self._turn("user")
        for here, kind, block in _blocks(content, name):
            match kind:
                case "text":
                    self._add("user", read(TextBlock, block, self._limits, here).text)
                case "tool_result":
                    self._result(read(ToolResultBlock, block, self._limits, here), here)
                case _:
                    _refuse_block(kind, here, "text and tool_result")

    def assistant(self, content: str | Sequence[object], name: str) -> None:
        message = self._turn("assistant")
        for here, kind, block in _blocks(content, name):
            match kind:
                case "text":
                    _append(message, "content", read(TextBlock, block, self._limits, here).text)
                case "thinking":
                    text = read(ThinkingBlock, block, self._limits, here).thinking
                    _append(message, "reasoning_content", text)
                case "redacted_thinking":
                    read(RedactedThinkingBlock, block, self._limits, here)
                case "tool_use":
                    self._call(message, read(ToolUseBlock, block, self._limits, here), here)
                case _:
                    _refuse_block(kind, here, "text, thinking and tool_use")

    def check_end(self) -> None:
        """The answer cannot continue a turn that ends with calls."""
        if self.messages and self.messages[-1].get("tool_calls"):
            place = next(iter(self._unanswered.values()))
            raise refuse(place, "a tool_result must follow this tool_use")

    def _call(self, message: ChatMessage, block: ToolUseBlock, name: str) -> None:
        if block.id in self._calls:
            raise refuse(f"{name}.id", "is that of an earlier tool_use")
        self._calls[block.id] = check_called(block.name, f"{name}.name")
        self._unanswered[block.id] = name
        function = {"name": block.name, "arguments": self._inputs.at(name, block.input)}
        message.setdefault("tool_calls", []).append(
            {"id": block.id, "type": "function", "function": function}
        )

    def _result(self, block: ToolResultBlock, name: str) -> None:
        called = self._calls.get(block.tool_use_id)
        if called is None:
            raise refuse(f"{name}.tool_use_id", "no tool_use before it has this id")
        self._unanswered.pop(block.tool_use_id, None)
        texts = () if block.content is None else self._texts(block.content, f"{name}.content")
        self.messages.append(
            {
                "role": "tool",
                "tool_call_id": block.tool_use_id,
                "name": called,
                "content": BETWEEN.join(texts),
            }
        )

    def _texts(self, content: str | Sequence[object], name: str) -> Iterator[str]:
        for here, kind, block in _blocks(content, name):
            if kind != "text":
                _refuse_block(kind, here, "text")
            yield read(TextBlock, block, self._limits, here).text

    def _add(self, role: str, text: str) -> None:
        _append(self._turn(role), "content", text)

    def _turn(self, role: str) -> ChatMessage:
        """The last message if it has this role, else a new one."""
        if not self.messages or self.messages[-1]["role"] != role:
            self.messages.append({"role": role, "content": []})
        return self.messages[-1]


def _append(message: ChatMessage, field: str, text: str) -> None:
    """Texts are joined once, at the end: a turn may have thousands."""
    message.setdefault(field, []).append(text)


def _joined(message: ChatMessage) -> ChatMessage:
    for field, value in message.items():
        if isinstance(value, list) and field != "tool_calls":
            message[field] = BETWEEN.join(itertools.dropwhile(lambda text: not text, value))
    return message


def _blocks(content: str | Sequence[object], name: str) -> Iterator[tuple[str, str, object]]:
    """Name, type and value of each block; a text is one block."""
    if isinstance(content, str):
        yield name, "text", {"type": "text", "text": content}
        return
    for index, block in enumerate(content):
        here = f"{name}.{index}"
        if not isinstance(block, dict):
            raise refuse(here, "must be an object")
        kind = block.get("type")
        if not isinstance(kind, str):
            raise refuse(f"{here}.type", "must be a string")
        yield here, kind, block


def _refuse_block(kind: str, name: str, supported: str) -> NoReturn:
    raise UnsupportedFieldError(
        f"{name}.type: {kind[:MAX_SHOWN]!r} is not supported here: only {supported} is", field=f"{name}.type"
    )


def messages_size(values: Sequence[Any], system: Any) -> int:
    """Rendering cost of the messages, in characters, before they are read: at least that of their texts. Counting stops
    at the limit."""
    size = MESSAGE_CHARACTERS * (len(values) + 1)
    waiting: list[Any] = [values, system]
    while waiting and size <= INLINE_CHAT_CHARACTERS:
        value = waiting.pop()
        if isinstance(value, str):
            size += len(value)
        elif isinstance(value, Mapping):
            size += MEMBER_CHARACTERS * len(value)
            waiting += value.values()
        elif isinstance(value, list):
            size += MEMBER_CHARACTERS * len(value)
            waiting += value if len(value) <= INLINE_CHAT_CHARACTERS else ()
    return size
