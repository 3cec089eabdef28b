"""Reads the conversation of a gRPC request."""

from __future__ import annotations

import re
from contextlib import AbstractContextManager
from typing import Any

from cluster.errors import InvalidRequestError
from router.frontends.field_names import renamed
from router.request.fields import refuse
from router.request.json_text import JsonTexts
from router.request.limits import FieldLimits
from router.request.messages import MAX_CALL_ID, template_call
from router.request.options import REASONING_EFFORTS, template_effort
from router.request.tools import (
    check_called,
    check_count,
    check_kwargs,
    check_named,
    check_tools,
    make_tool,
    read_choice,
)
from router.text.contents import role_of
from router.text.conversation import Conversation, Tool
from router.text.tokenizer import MESSAGE_CHARACTERS
from wire import inference_pb2 as pb

# Code of all endpoints names fields as HTTP's chats do, where those of a tool are below `function`.
_PARTS = (
    (re.compile(r"^chat_template_kwargs(?=[.:]|$)"), "chat.template_kwargs"),
    (re.compile(r"^(?=(?:messages|tools|tool_choice|continue_final_message)(?:[.\[:]|$))"), "chat."),
    (re.compile(r"^(chat\.(?:\w+\[\d+\]\.)*?(?:tools|tool_calls)\[\d+\])\.function(?=[.:]|$)"), r"\1"),
    (re.compile(r"^(chat\.messages\[\d+\])\.reasoning_content(?=[.:]|$)"), r"\1.reasoning"),
)


def named_in_chat() -> AbstractContextManager[None]:
    """Errors within name the fields of the message's `chat`."""
    return renamed({}, _PARTS)


def check_conversation(chat: pb.ChatMessages, limits: FieldLimits) -> None:
    """Check counts, before anything iterates over them."""
    if not chat.messages:
        raise InvalidRequestError("chat: has no messages", field="chat")
    limits.check_messages(len(chat.messages))
    check_count(len(chat.tools), limits, "chat.tools")


def size_of(chat: pb.ChatMessages) -> int:
    """The cost of rendering it, in characters."""
    return chat.ByteSize() + MESSAGE_CHARACTERS * (len(chat.messages) + len(chat.tools))


def read_conversation(chat: pb.ChatMessages, limits: FieldLimits) -> Conversation:
    """Raises InvalidRequestError naming a field."""
    texts = JsonTexts(limits.settings)
    tools = [_tool(one, f"chat.tools[{i}]", texts) for i, one in enumerate(chat.tools)]
    check_tools(tools, limits, "chat.tools")
    if chat.tool_choice and chat.tool_name:
        raise refuse("chat.tool_name", "not with tool_choice: the tool is chosen already")
    _, choice, _ = read_choice(chat.tool_choice or None, tools, "chat.tool_choice")
    name = check_named(chat.tool_name, tools, "chat.tool_name") if chat.tool_name else ""
    kwargs = chat.template_kwargs
    continues = chat.continue_final_message
    if continues and chat.add_generation_prompt:
        raise refuse(
            "chat.continue_final_message", "not with add_generation_prompt, which begins a new message"
        )
    return Conversation(
        [_message(one, f"chat.messages[{i}]", texts) for i, one in enumerate(chat.messages)],
        tools,
        choice,
        name,
        chat.parallel_tool_calls if chat.HasField("parallel_tool_calls") else True,
        check_kwargs(
            texts.object(kwargs, "chat.template_kwargs") if kwargs else None,
            "chat.template_kwargs",
        ),
        _effort(chat.reasoning_effort),
        chat.add_generation_prompt if chat.HasField("add_generation_prompt") else not continues,
        continues,
    )


def _tool(tool: pb.Tool, field: str, texts: JsonTexts) -> Tool:
    parameters = texts.object(tool.parameters, f"{field}.parameters") if tool.parameters else None
    return make_tool(tool.name, tool.description or None, parameters, tool.strict, field)


def _message(message: pb.ChatMessage, field: str, texts: JsonTexts) -> dict[str, Any]:
    role = role_of(message.role, f"{field}.role")
    made: dict[str, Any] = {"role": role, "content": message.content}
    if message.tool_calls and role != "assistant":
        raise refuse(f"{field}.tool_calls", "only an assistant's message has tool calls")
    if message.tool_calls:
        made["tool_calls"] = [
            template_call(_call_id(one.id, f"{at}.id"), one.name, one.arguments, at, texts)
            for one, at in ((one, f"{field}.tool_calls[{i}]") for i, one in enumerate(message.tool_calls))
        ]
    if role == "tool":
        made["tool_call_id"] = _call_id(message.tool_call_id, f"{field}.tool_call_id")
        if message.name:
            made["name"] = check_called(message.name, f"{field}.name")
    if role == "assistant" and message.HasField("reasoning"):
        made["reasoning_content"] = message.reasoning
    return made


def _effort(given: str) -> str | None:
    """The reasoning effort, of a fixed set: a template may write it beside its own special tokens."""
    if given and given not in REASONING_EFFORTS:
        raise refuse("chat.reasoning_effort", f"must be one of {', '.join(REASONING_EFFORTS)}")
    return template_effort(given or None)


def _call_id(given: str, field: str) -> str:
    if not 1 <= len(given) <= MAX_CALL_ID:
        raise refuse(field, f"must have 1 … {MAX_CALL_ID} characters", MAX_CALL_ID)
    return given
