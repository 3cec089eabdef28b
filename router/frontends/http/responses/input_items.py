"""The items of a response's input, as the messages of a chat.

    message                          its role and text
    reasoning, message, function_call …   one message of the assistant
    function_call_output             a tool's message

Items that only a hosted tool makes, references to stored items, images and files are refused by name.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import PlainValidator

from cluster.errors import InvalidRequestError, UnsupportedFieldError
from router.request.fields import RequestModel, read, refuse, text_or_list, wrong
from router.request.json_text import JsonTexts
from router.request.limits import MAX_SHOWN, FieldLimits
from router.request.messages import CallId, RefusalPart, content_size, template_call
from router.text.contents import role_of
from router.text.tokenizer import INLINE_CHAT_CHARACTERS, MESSAGE_CHARACTERS

_SIZED = ("content", "output", "arguments", "encrypted_content")  # what may be long in an item
_TEXT_TYPES = ("input_text", "output_text", "text")


class InputTextPart(RequestModel):
    type: Literal["input_text", "output_text", "text"]
    text: str


class ReasoningPart(RequestModel):
    type: Literal["reasoning_text", "summary_text"]
    text: str


Parts: TypeAlias = Annotated[
    Any, PlainValidator(text_or_list("parts"), str | list[InputTextPart | RefusalPart])
]
Texts: TypeAlias = Annotated[Any, PlainValidator(text_or_list("parts"), str | list[InputTextPart])]


class MessageItem(RequestModel):
    """Other fields, such as `id`, `status` and `phase`, are ignored; so are those of the other items."""

    type: Literal["message"] | None = None
    role: Literal["user", "system", "developer", "assistant"]
    content: Parts


class FunctionCallItem(RequestModel):
    type: Literal["function_call"]
    call_id: CallId
    name: str
    arguments: str | None  # null: as an empty object


class FunctionCallOutputItem(RequestModel):
    type: Literal["function_call_output"]
    call_id: CallId
    output: Texts


def _uncopied(value: object) -> list[Any] | None:
    """A list that is not walked: one may have a million entries, and those of a summary change nothing."""
    if not isinstance(value, list | None):
        raise wrong("must be a list")
    return value


Unread: TypeAlias = Annotated[list[Any] | None, PlainValidator(_uncopied, list[Any] | None)]


class ReasoningItem(RequestModel):
    type: Literal["reasoning"]
    summary: Unread = None
    content: Unread = None
    encrypted_content: str | None = None


AnyItem: TypeAlias = MessageItem | FunctionCallItem | FunctionCallOutputItem | ReasoningItem
ChatMessage: TypeAlias = dict[str, Any]
_PREFIX = "baton-reasoning-1:"


def encrypted(text: str) -> str:
    """A reasoning's text for the `encrypted_content` of later requests. It is encoded, not secret: the answer shows it."""
    return base64.b64encode((_PREFIX + text).encode(errors="surrogatepass")).decode()


def _decrypted(content: str, name: str) -> str:
    try:
        text = base64.b64decode(content, validate=True).decode()
    except (ValueError, binascii.Error):
        text = ""
    if not text.startswith(_PREFIX):
        raise refuse(name, "is not from this server")
    return text.removeprefix(_PREFIX)


def read_items(
    given: str | Sequence[object], instructions: str | None, limits: FieldLimits
) -> list[ChatMessage]:
    """The messages of a chat. Raises InvalidRequestError or UnsupportedFieldError naming the item and its field."""
    reader = _Reader(limits)
    if instructions:
        reader.messages.append({"role": "system", "content": instructions})
    if isinstance(given, str):
        reader.messages.append({"role": "user", "content": given})
    else:
        for index, item in enumerate(given):
            reader.add(item, f"input[{index}]")
    return reader.messages


class _Reader:
    def __init__(self, limits: FieldLimits):
        self.messages: list[ChatMessage] = []
        self._limits = limits
        self._texts = JsonTexts(limits.settings)
        self._answer: ChatMessage | None = None  # the assistant's message that further items may belong to
        self._calls: dict[str, str] = {}  # names of functions, by call

    def add(self, item: object, name: str) -> None:
        if not isinstance(item, dict):
            raise refuse(name, "must be an object")
        kind = item.get("type", "message" if "role" in item else None)
        match kind:
            case "message" | None if "role" in item:
                self._message(read(MessageItem, item, self._limits, name), name)
            case "function_call":
                self._call(read(FunctionCallItem, item, self._limits, name), name)
            case "function_call_output":
                self._output(read(FunctionCallOutputItem, item, self._limits, name), name)
            case "reasoning":
                self._reasoning(read(ReasoningItem, item, self._limits, name), name)
            case "item_reference":
                raise UnsupportedFieldError(
                    f"{name}.type: item_reference: no item is stored here; send the item itself",
                    field=f"{name}.type",
                )
            case str() if kind != "message":
                raise UnsupportedFieldError(
                    f"{name}.type: {kind[:MAX_SHOWN]!r} is not supported", field=f"{name}.type"
                )
            case _:
                raise refuse(f"{name}.role", "is missing")

    def _message(self, item: MessageItem, name: str) -> None:
        text = "".join(
            _texts(item.content, f"{name}.content", self._limits, refusals=item.role == "assistant")
        )
        if item.role != "assistant":
            self._answer = None
            self.messages.append({"role": role_of(item.role, f"{name}.role"), "content": text})
            return
        self._assistant(after=("content", "tool_calls"))["content"] = text

    def _call(self, item: FunctionCallItem, name: str) -> None:
        if item.call_id in self._calls:
            raise refuse(f"{name}.call_id", "is that of an earlier call")
        self._calls[item.call_id] = item.name
        call = template_call(item.call_id, item.name, item.arguments or "", name, self._texts)
        self._assistant(after=()).setdefault("tool_calls", []).append(call)

    def _output(self, item: FunctionCallOutputItem, name: str) -> None:
        if item.call_id not in self._calls:
            raise refuse(f"{name}.call_id", "no function_call before it has this call_id")
        self._answer = None
        text = "".join(_texts(item.output, f"{name}.output", self._limits, refusals=False))
        self.messages.append(
            {
                "role": "tool",
                "tool_call_id": item.call_id,
                "name": self._calls[item.call_id],
                "content": text,
            }
        )

    def _reasoning(self, item: ReasoningItem, name: str) -> None:
        """Its text is the content, else the encrypted one. A summary alone is not the model's reasoning."""
        if item.content:
            pieces = [
                read(ReasoningPart, part, self._limits, f"{name}.content[{index}]").text
                for index, part in enumerate(item.content)
            ]
        elif item.encrypted_content:
            pieces = [_decrypted(item.encrypted_content, f"{name}.encrypted_content")]
        else:
            return
        answer = self._assistant(after=("content", "tool_calls", "reasoning_content"))
        answer["reasoning_content"] = "".join(pieces)

    def _assistant(self, after: Sequence[str]) -> ChatMessage:
        """The message that the item belongs to: a new one if the last one has a part that comes `after` the item's."""
        if self._answer is None or any(part in self._answer and self._answer[part] for part in after):
            self._answer = {"role": "assistant", "content": ""}
            self.messages.append(self._answer)
        return self._answer


def _texts(content: str | list[Any], name: str, limits: FieldLimits, *, refusals: bool) -> Iterator[str]:
    if isinstance(content, str):
        yield content
        return
    for index, part in enumerate(content):
        here = f"{name}[{index}]"
        kind = part.get("type") if isinstance(part, dict) else None
        if kind in _TEXT_TYPES:
            yield read(InputTextPart, part, limits, here).text
        elif kind == "refusal" and refusals:
            yield read(RefusalPart, part, limits, here).refusal
        elif isinstance(kind, str):
            raise UnsupportedFieldError(
                f"{here}.type: {kind[:MAX_SHOWN]!r} is not supported: only text is", field=f"{here}.type"
            )
        else:
            raise _untyped(here, part)


def _untyped(name: str, part: object) -> InvalidRequestError:
    if isinstance(part, dict):
        return refuse(f"{name}.type", "must be a string")
    return refuse(name, "must be an object")


def items_size(given: str | Sequence[Any], instructions: str | None) -> int:
    """Rendering cost of an input, in characters, before it is read. Counting stops at the limit; values of a wrong type
    count as nothing."""
    size = MESSAGE_CHARACTERS + len(instructions or "")
    if isinstance(given, str):
        return size + MESSAGE_CHARACTERS + len(given)
    size += MESSAGE_CHARACTERS * len(given)
    for item in given:
        if size > INLINE_CHAT_CHARACTERS:
            break
        if isinstance(item, dict):
            size += sum(content_size(item.get(name)) for name in _SIZED)
    return size
