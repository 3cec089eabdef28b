"""A conversation as every endpoint hands it on: messages, tools and options of the chat template."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import orjson

from router.text.written_numbers import WithWrittenNumbers

ToolChoice = Literal["none", "auto", "required"]


@dataclass(frozen=True)
class Tool:
    """A function that the model may call. `parameters` is a JSON schema; None: it has none."""

    name: str
    description: str | None = None
    parameters: Mapping[str, Any] | None = None
    strict: bool = False  # the arguments of every call match `parameters`
    # Among all tools of the request, where only some of them are allowed
    place: int | None = field(default=None, compare=False)

    def for_template(self) -> dict[str, Any]:
        """The object that chat templates read, as transformers and vLLM hand it over."""
        function: dict[str, Any] = {"name": self.name}
        if self.description is not None:
            function["description"] = self.description
        if self.parameters is not None:
            function["parameters"] = self.parameters
        return {"type": "function", "function": function}


@dataclass(frozen=True)
class Conversation:
    """The input of a chat template, and which calls the answer may have.

    `messages`: a role (system, user, assistant, tool) and `content` each. An assistant's may have `tool_calls` — objects
    `{"id", "type": "function", "function": {"name", "arguments"}}` with arguments as an object — and
    `reasoning_content`; a tool's has `tool_call_id`.
    """

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Tool] = ()
    tool_choice: ToolChoice = "auto"
    tool_name: str = ""  # the answer is one call of this tool; before tool_choice
    parallel_tool_calls: bool = True
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    reasoning_effort: str | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False  # the answer continues the last message's content

    @property
    def characters(self) -> int:
        """Characters of the messages' contents, reasoning and calls."""
        return sum(map(len, self._texts()))

    def _texts(self) -> Iterator[str]:
        for message in self.messages:
            yield message["content"]
            yield message.get("reasoning_content", "")
            for call in message.get("tool_calls", ()):
                yield call["function"]["name"]
                # As the template writes them: numbers and lists count as well
                yield orjson.dumps(call["function"]["arguments"], default=str).decode()

    @property
    def has_written_numbers(self) -> bool:
        return any(
            isinstance(call["function"]["arguments"], WithWrittenNumbers)
            for message in self.messages
            for call in message.get("tool_calls", ())
        )

    @property
    def callable(self) -> Sequence[Tool]:
        """The tools that the answer may call."""
        if self.tool_name:
            return [one for one in self.tools if one.name == self.tool_name]
        return () if self.tool_choice == "none" else self.tools

    @property
    def must_call(self) -> bool:
        return bool(self.tool_name) or self.tool_choice == "required"
