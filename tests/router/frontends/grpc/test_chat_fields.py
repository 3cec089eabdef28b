"""Errors about a chat name its fields as the message has them."""

from __future__ import annotations

from typing import Any
from unittest.mock import AsyncMock, MagicMock

import pytest

from cluster.errors import InvalidRequestError, OverloadedError
from router.frontends.grpc.conversation import named_in_chat
from router.frontends.grpc.service import InferenceService
from router.request.fields import refuse
from wire import inference_pb2 as pb


@pytest.mark.parametrize(
    ("field", "named"),
    [
        ("messages", "chat.messages"),
        ("messages[1].content", "chat.messages[1].content"),
        ("messages[0].tool_calls[2].function.arguments.a", "chat.messages[0].tool_calls[2].arguments.a"),
        ("messages[0].reasoning_content", "chat.messages[0].reasoning"),
        ("chat.messages[0].reasoning_content", "chat.messages[0].reasoning"),
        ("tools", "chat.tools"),
        ("tools[3].function.parameters", "chat.tools[3].parameters"),
        ("tool_choice", "chat.tool_choice"),
        ("continue_final_message", "chat.continue_final_message"),
        ("chat_template_kwargs.a", "chat.template_kwargs.a"),
        ("chat.tools[0].name", "chat.tools[0].name"),
        ("chat", "chat"),
        ("grammar", "grammar"),
        ("messages_other", "messages_other"),
    ],
)
def test_a_field_of_http_s_chats_is_named_as_in_the_message(field: str, named: str) -> None:
    with pytest.raises(InvalidRequestError) as caught, named_in_chat():
        raise refuse(field, "function.parameters: tools are wrong", 7)
    error = caught.value
    assert (error.field, error.limit) == (named, "7")
    assert error.message == f"{named}: function.parameters: tools are wrong"


def test_a_refusal_for_load_names_the_message_s_field_and_says_when_to_try_again() -> None:
    """As of the grammars of strict tools that wait too long to be compiled."""
    field = "tools[0].function.strict"
    with pytest.raises(OverloadedError) as caught, named_in_chat():
        raise OverloadedError(f"{field}: wait too long", field=field, limit="10 s", retry_after_seconds=2.0)
    error = caught.value
    assert (error.field, error.limit, error.retry_after_seconds) == ("chat.tools[0].strict", "10 s", 2.0)
    assert error.message == "chat.tools[0].strict: wait too long"


async def test_a_conversation_s_errors_name_its_fields() -> None:
    gateway: Any = MagicMock()
    model: Any = MagicMock()
    model.validator.limits.settings.max_tools = 1
    gateway.converse = AsyncMock(side_effect=refuse("tools[0].function.strict", "is not supported"))
    request = pb.TokenizeRequest(chat=pb.ChatMessages(messages=[pb.ChatMessage(role="user")]))
    with pytest.raises(InvalidRequestError) as caught:
        await InferenceService(gateway)._prompt(request, model, MagicMock(), None)
    assert caught.value.field == "chat.tools[0].strict"
