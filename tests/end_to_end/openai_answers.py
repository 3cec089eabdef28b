"""Answers of the openai package, put together from their parts."""

from __future__ import annotations


def ids_of(choice) -> list[int]:
    return choice.model_extra["token_ids"]


def whole_of(chunks) -> dict[int, dict]:
    """The chunks of a stream, joined by choice."""
    said: dict[int, dict] = {}
    for choice in (choice for chunk in chunks for choice in chunk.choices):
        one = said.setdefault(choice.index, {"text": "", "logprobs": [], "finish_reason": None})
        one["text"] += choice.delta.content or "" if hasattr(choice, "delta") else choice.text
        one["logprobs"].append(choice.logprobs)
        assert one["finish_reason"] is None
        one["finish_reason"] = choice.finish_reason
    return said
