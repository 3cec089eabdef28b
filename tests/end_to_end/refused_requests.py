"""Requests that both endpoints refuse, and the numbers of gRPC requests."""

from __future__ import annotations

from typing import Any

from cluster.errors import BatonError, ContextLengthError, InvalidRequestError, UnknownModelError
from tests.harness.model_text import CONTEXT, VOCAB

BAD: list[tuple[str, dict, str]] = [
    ("completions", {"prompt": ""}, "prompt"),
    ("completions", {"prompt": []}, "prompt"),
    ("completions", {}, "prompt"),
    ("completions", {"prompt": "abc", "max_tokens": CONTEXT}, "max_tokens"),
    ("completions", {"prompt": "abc", "max_tokens": 0}, "max_tokens"),
    ("completions", {"prompt": [VOCAB]}, "prompt"),
    ("completions", {"prompt": [-1]}, "prompt"),
    ("completions", {"prompt": "abc", "temperature": -0.1}, "temperature"),
    ("completions", {"prompt": "abc", "temperature": "hot"}, "temperature"),
    ("completions", {"prompt": "abc", "top_p": 1.5}, "top_p"),
    ("completions", {"prompt": "abc", "n": 0}, "n"),
    ("completions", {"prompt": "abc", "n": 1000}, "n"),
    ("completions", {"prompt": "abc", "stop": 5}, "stop"),
    ("completions", {"prompt": "abc", "stop": [""]}, "stop"),
    ("completions", {"prompt": "abc", "logit_bias": {"x": 1}}, "logit_bias"),
    ("completions", {"prompt": "abc", "logprobs": 500}, "logprobs"),
    ("completions", {"prompt": "abc", "no_such_field": 1}, "no_such_field"),
    ("completions", {"prompt": "abc", "stream": "yes"}, "stream"),
    ("completions", {"prompt": "abc", "stream_options": {"include_all": True}}, "stream_options"),
    ("chat/completions", {"messages": []}, "messages"),
    ("chat/completions", {"messages": [{"role": "alien", "content": "x"}]}, "messages[0].role"),
    ("chat/completions", {"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
    (
        "chat/completions",
        {"messages": [{"role": "user", "content": "x"}], "tools": [{"type": "function"}]},
        "tools[0]",
    ),
    ("chat/completions", {"messages": [{"role": "user", "content": "x"}], "top_logprobs": 3}, "top_logprobs"),
    ("completions", {"prompt": "x", "guided_json": {"properties": {"a": {"not": {}}}}}, "guided_json"),
    ("completions", {"prompt": "x", "guided_regex": "a+", "stop": "a"}, "stop"),
]


FLOATS = ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
BAD_OPTIONS: list[tuple[dict[str, Any], type[BatonError]]] = [
    ({"model": "another"}, UnknownModelError),
    ({"temperature": -1.0}, InvalidRequestError),
    ({"max_tokens": CONTEXT}, ContextLengthError),
    ({"top_p": 2.0}, InvalidRequestError),
]
