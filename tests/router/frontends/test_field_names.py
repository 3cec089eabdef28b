"""Errors of a conversation and of its options name the fields that an endpoint's clients send."""

from __future__ import annotations

from types import ModuleType

import pytest

from cluster.errors import InvalidRequestError
from router.frontends.field_names import renamed
from router.frontends.http.anthropic import endpoint as messages
from router.frontends.http.responses import endpoint as responses
from router.request.fields import refuse


@pytest.mark.parametrize(
    ("endpoint", "field", "named"),
    [
        (responses, "messages", "input"),
        (responses, "messages[2].content", "input"),
        (responses, "messages[0].tool_calls[1].function.arguments.a", "input"),
        (responses, "max_tokens", "max_output_tokens"),
        (responses, "tools[1].function.parameters", "tools[1].parameters"),
        (responses, "temperature", "temperature"),
        (messages, "messages", "messages"),
        (messages, "messages[2].content", "messages"),
        (messages, "stop", "stop_sequences"),
        (messages, "tools[1].function.parameters", "tools.1.input_schema"),
        (messages, "tools[1].function.strict", "tools.1.strict"),
        (messages, "continue_final_message", "messages"),
        (messages, "max_tokens", "max_tokens"),
    ],
)
def test_a_field_of_chats_is_named_as_the_endpoint_has_it(
    endpoint: ModuleType, field: str, named: str
) -> None:
    with pytest.raises(InvalidRequestError) as caught, renamed(endpoint._NAMES, endpoint._PARTS):
        raise refuse(field, "is wrong", 7)
    assert (caught.value.field, caught.value.limit) == (named, "7")
    assert caught.value.message == f"{named}: is wrong"
