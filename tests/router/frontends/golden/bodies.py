"""Request bodies for the golden table: every field with every kind of value, and the combinations that matter."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import orjson

CHAT, COMPLETION, CONTEXT = "/v1/chat/completions", "/v1/completions", 64
# Settings of the routers that the bodies are sent to, by name
SETTINGS: dict[str, dict[str, Any]] = {
    "strict": {
        "max_model_len": CONTEXT,
        "max_choices": 4,
        "max_prompts": 3,
        "max_stop_strings": 2,
        "max_stop_string_characters": 8,
        "max_stop_token_ids": 3,
        "max_logit_bias": 2,
        "max_allowed_token_ids": 3,
        "max_bad_words": 2,
        "max_bad_word_characters": 8,
        "max_logprobs": 5,
        "max_answer_entries": 1200,
        "max_text_bytes": 4096,
    },
    "tolerant": {"max_model_len": CONTEXT, "unknown_fields": "ignore", "priority_order": "lower_first"},
    "least": {
        "max_model_len": CONTEXT,
        "max_choices": 1,
        "max_prompts": 1,
        "max_stop_token_ids": 0,
        "max_logit_bias": 0,
        "max_allowed_token_ids": 0,
        "max_bad_words": 0,
        "max_logprobs": 0,
        "max_json_depth": 4,
        "max_json_elements": 1 << 10,
        "max_body_bytes": 1 << 14,
    },
}
GENERATION = {"temperature": 0.5, "top_k": 20, "min_p": None, "eos_token_id": 2}  # in generation_config.json

SHARED = [
    "model", "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty",
    "seed", "n", "best_of", "max_tokens", "max_completion_tokens", "min_tokens", "stop", "stop_token_ids",
    "ignore_eos", "logprobs", "top_logprobs", "logit_bias", "include_stop_str_in_output", "priority", "cache_salt",
    "truncate_prompt_tokens", "spaces_between_special_tokens", "stream", "stream_options", "return_token_ids",
    "reasoning_effort", "allowed_token_ids", "bad_words",
]  # fmt: skip
HARMLESS = [
    "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention",
    "parallel_tool_calls", "verbosity",
]  # fmt: skip
NEUTRAL = [
    "tools", "tool_choice", "functions", "function_call", "echo", "suffix", "modalities", "audio",
    "prediction", "web_search_options", "skip_special_tokens", "prompt_logprobs",
]  # fmt: skip
STRUCTURED = [
    "response_format", "structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar",
]  # fmt: skip
UNKNOWN = ["top_a", "include_stop_text", "prompt", "messages", "", "request_id", "explain", "x" * 2000]
KINDS: list[Any] = [
    None, True, False, 0, 1, -1, 2, 2**31, 2**63, 2**64 - 1, 0.0, 0.5, 1.0, -0.5, 1e308, "", "1", "x" * 500,
    [], [1], ["a"], [True], [None], [[1]], {}, {"1": 1}, {"a": "b"},
]  # fmt: skip

FEW_KINDS: list[Any] = [None, True, 0, 1.5, "x", [], [1], {}]

# The last value that is accepted and the first that is not, or whatever else is special about a field.
UNCOMPILED = {"properties": {"a/b": {"items": {"type": "array", "uniqueItems": True}}}}
SPECIAL: dict[str, list[Any]] = {
    "model": ["tiny", "other", "x" * 1000, "tiny ", "TINY"],
    "temperature": [100, 100.1, -1e-9, 1e-320, 0.7],
    "top_k": [-(2**31), -(2**31) - 1, 4095, 4096, 4097, 2**32, 1.5],
    "top_p": [1, 1.0001, 1e-9, 1e-46, 5e-324, -0.0],
    "min_p": [1, 1.0001, 1e-46, -1e-9],
    "repetition_penalty": [100, 100.1, 1e-9, 1e-46],
    "presence_penalty": [-2, 2, -2.1, 2.1],
    "frequency_penalty": [-2, 2, -2.1, 2.1],
    "seed": [-(2**63), -(2**63) - 1, 2**64, 12345, -1, 1e30],
    "n": [3, 4, 5],
    "best_of": [1.0, 3],
    "max_tokens": [10, 58, 59, 60, 61, 62, 63, 64, 65, 2**31 + 1, 3.0],
    "max_completion_tokens": [10, 63, 64, 2**31 + 1],
    "min_tokens": [16, 17, 62, 63],
    "stop": [
        ["a", "b"], ["a", "b", "c"], [""], ["a", ""], "x" * 8, "x" * 9, ["x" * 9], ["é" * 8], ["a", 1],
        {"a": 1}, ["\U0001f600"],
    ],
    "stop_token_ids": [[1, 2, 3], [1, 2, 3, 4], [4095], [4096], [-1], [0], [1.0], [2**63], ["1"], "1", [1, True]],
    "logprobs": [5, 6, 20, 21],
    "top_logprobs": [5, 6],
    "logit_bias": [
        {"1": 1, "2": -1}, {"1": 1, "2": 1, "3": 1}, {"4095": 0}, {"4096": 0}, {"-1": 0}, {"+1": 0}, {" 1": 0},
        {"01": 5}, {"1": 100}, {"1": 100.1}, {"1": -100}, {"1": -100.1}, {"1": True}, {"1": None}, {"1": "1"},
        {"0000000001": 1}, {"00000000001": 1}, {"9999999999": 1}, {"": 1}, {"¹": 1}, {"١": 1}, {"1_0": 1},
        {"x" * 3000: 1}, {"1": 1e308},
    ],
    "priority": ["high", "normal", "batch", "urgent", 32768, 32769, -32768, -32769, 1.5, 5, -5],
    "cache_salt": ["x", "x" * 256, "x" * 257, "\x00", "é"],
    "truncate_prompt_tokens": [-2, 3, 63, 64, 65, -1.0],
    "stream_options": [
        {"include_usage": True}, {"include_usage": None}, {"include_usage": 1}, {"include_usage": "true"},
        {"include_obfuscation": False}, {"include_obfuscation": 0}, {"continuous_usage_stats": True},
        {"continuous_usage_stats": []}, {"other": 1}, {"include_usage": True, "other": 1}, {"x" * 3000: 1},
        {"include_usage": 1, "continuous_usage_stats": 1},
    ],
    "reasoning_effort": ["none", "minimal", "low", "medium", "high", "xhigh", "max", "hard", "LOW"],
    "tools": [[{"type": "function"}]],
    "tool_choice": ["none", "auto", "required", {"type": "allowed_tools"}],
    "function_call": ["none", "auto"],
    "response_format": [
        {"type": "text"}, {"type": "json_object"}, {"type": "text", "more": 1}, {"type": "json_schema"},
        {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "null"}, "strict": True}},
        {"type": "json_schema", "json_schema": {"schema": {"type": "null"}, "strict": 1}},
        {"type": "text", "json_schema": None}, {"type": "json_object", "more": None},
        {"type": "json_schema", "json_schema": None},
        {"type": "json_schema", "json_schema": {"schema": {"type": "null"}, "more": None}, "more": None},
        {"type": "json_schema", "json_schema": {"name": "a"}},
        {"type": "json_schema", "json_schema": {"name": "a", "schema": {}, "more": 1}},
        {"type": "json_schema", "json_schema": {"name": "a", "schema": UNCOMPILED}}, {"type": "structural_tag"},
    ],
    "structured_outputs": [
        {"json": {"type": "null"}}, {"json": "{}"}, {"json": "{"}, {"regex": "a+"}, {"regex": "("}, {"choice": ["a", "b"]},
        {"choice": []}, {"grammar": 'start: "a"'}, {"grammar": "start: b"}, {"json_object": True}, {"json_object": 1},
        {"json_object": False}, {"regex": "a", "choice": ["b"]}, {"structural_tag": "x"}, {"json": UNCOMPILED},
        {"regex": "a", "disable_any_whitespace": False}, {"json": {"type": "null"}, "disable_any_whitespace": True},
        {"grammar": 'start: %json {"type": "null"}', "disable_any_whitespace": True}, {"disable_fallback": True},
        {"regex": "a", "disable_fallback": True}, {"regex": "a", "disable_fallback": 1},
    ],
    "guided_json": [True, {"type": "null"}, '{"type":"null"}', UNCOMPILED, {"type": "strin"}, {"x": "y" * 140_000}],
    "guided_regex": ["a|b", "(", ""],
    "guided_choice": [["a"], [""], ["a", 1]],
    "guided_grammar": [
        'start: "a" start | "b"', "start: c", '{"grammars": []}', 'start: %json {"x-guidance": {}}',
    ],
    "allowed_token_ids": [[0, 7, 4095], [1, 2, 3, 4], [4096], [-1], [2**63], [1.0], ["1"], [5, 5]],
    "bad_words": [
        ["the"], ["the", " a cat"], ["a", "b", "c"], ["x" * 8], ["x" * 9], [""], ["a", " "], ["\n"], ["</s>"],
        "the", ["a", None],
    ],
    "modalities": [["text"], ["audio"], ["text", "text"]],
    "skip_special_tokens": [True],
}  # fmt: skip

PROMPTS: list[Any] = [
    "abc", "", " ", "a " * 30, "a " * 62, "a " * 500, "x" * 5000, "\x00", "<s>", [], [1], [1, 2, 3], [4095], [4096], [-1],
    [True], [1.0], [1] * 63, [1] * 64, [1] * 100, ["a"], ["a", "b", "c"], ["a", "b", "c", "d"], ["a"] * 64, [""],
    ["a", ""], [[1], [2]], [[1], "a"], [[]], [[1], []], [[1] * 63], [[1] * 64], [[True]], [[1.5]], [[[1]]], [{"a": 1}],
    [None],
    ["a", 1], [1, "a"], [1, None], {"text": "a"}, 7, None, True, [[4096]], [[1], [-1]], [2**63],
]  # fmt: skip

TEXT_PART = {"type": "text", "text": "hello"}
CONTENTS: list[Any] = [
    "hello", "", "é\U0001f600", "<s></s>", "a " * 500, [TEXT_PART], [TEXT_PART, TEXT_PART], [], None, 5, True, {},
    {"text": "a"}, [None], ["a"], [{"type": "text"}], [{"type": "text", "text": 5}],
    [{"type": "image_url", "image_url": {"url": "x"}}],
    [TEXT_PART, {"type": "refusal", "refusal": "no"}], [{**TEXT_PART, "more": 1}], [{"text": "a"}], [[TEXT_PART]],
]  # fmt: skip
ROLES: list[Any] = [
    "system", "developer", "user", "assistant", "tool", "function", "", "USER", "x" * 100, None, 5, ["user"],
]  # fmt: skip
USER = {"role": "user", "content": "hello"}
MESSAGE_MORE: list[dict[str, Any]] = [
    {"name": "bob"}, {"name": 5}, {"refusal": None}, {"tool_calls": []}, {"tool_calls": None},
    {"tool_calls": [{"id": "1"}]}, {"tool_calls": {}}, {"tool_calls": False}, {"function_call": None},
    {"function_call": {"name": "f"}},
    {"function_call": False}, {"tool_call_id": "1"}, {"audio": None},
]  # fmt: skip
MESSAGES: list[Any] = [
    None, [], {}, "hello", 5, [None], ["hello"], [[]], [{}], [{"content": "hello"}], [{"role": "user"}],
    [{"role": "assistant"}], [{"role": "assistant"}, USER], [USER, None], [USER, {"role": "nobody", "content": "a"}],
    [USER] * 5, [USER] * 30, [USER] * 63, [USER] * 64, [USER] * 1000, [None] * 64,
    [{"role": "system", "content": "be brief"}, USER, {"role": "assistant", "content": "hi"}, USER],
    [{"role": "system", "content": "a"}, {"role": "system", "content": "b"}],
    *([{"role": role, "content": "hello"}] for role in ROLES),
    *([{"role": "user", "content": content}] for content in CONTENTS),
    *([USER, {"role": "assistant", "content": content}] for content in CONTENTS),
    *([{**USER, **more}] for more in MESSAGE_MORE),
    *([{"role": "assistant", "content": None, **more}, USER] for more in MESSAGE_MORE),
]  # fmt: skip

TOGETHER: list[dict[str, Any]] = [
    {"n": 2, "best_of": 2},
    {"n": 2, "best_of": 3},
    {"n": 2, "best_of": None},
    {"n": None, "best_of": 1},
    {"n": None, "best_of": None},
    {"n": True, "best_of": True},
    {"max_tokens": 5, "max_completion_tokens": 7},
    {"max_tokens": 0, "max_completion_tokens": 7},
    {"max_tokens": "5", "max_completion_tokens": 7},
    {"max_tokens": 2**40, "max_completion_tokens": 7},
    {"max_tokens": 5, "max_completion_tokens": "7"},
    {"max_tokens": 5, "max_completion_tokens": 0},
    {"max_tokens": None, "max_completion_tokens": None},
    {"max_tokens": 5, "min_tokens": 5},
    {"max_tokens": 5, "min_tokens": 6},
    {"max_completion_tokens": 5, "min_tokens": 6},
    {"max_tokens": None, "min_tokens": 40},
    {"logprobs": True, "top_logprobs": 0},
    {"logprobs": True, "top_logprobs": 5},
    {"logprobs": True, "top_logprobs": 6},
    {"logprobs": True, "top_logprobs": -1},
    {"logprobs": True, "top_logprobs": None},
    {"logprobs": True, "top_logprobs": "1"},
    {"logprobs": True, "top_logprobs": True},
    {"logprobs": False, "top_logprobs": 0},
    {"logprobs": False, "top_logprobs": 3},
    {"logprobs": False, "top_logprobs": -1},
    {"logprobs": None, "top_logprobs": 3},
    {"logprobs": None, "top_logprobs": 30},
    {"logprobs": 1, "top_logprobs": 1},
    {"logprobs": 5, "n": 4, "max_tokens": 50},
    {"logprobs": 5, "n": 4, "max_tokens": 51},
    {"logprobs": True, "top_logprobs": 5, "n": 4, "max_tokens": 50},
    {"logprobs": True, "top_logprobs": 5, "n": 4, "max_tokens": 51},
    {"logprobs": 5, "n": 4, "max_tokens": None},
    {"stream": True},
    {"stream": True, "stream_options": {"include_usage": True}},
    {"stream": True, "stream_options": {"continuous_usage_stats": True}},
    {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}},
    {"stream": True, "stream_options": None, "return_token_ids": True},
    {"stream": False, "stream_options": {"include_usage": True}},
    {"stream": True, "stream_options": {"include_usage": 1}},
    {"truncate_prompt_tokens": -1, "max_tokens": 60},
    {"truncate_prompt_tokens": -1, "max_tokens": None},
    {"truncate_prompt_tokens": -1, "max_tokens": "1"},
    {"truncate_prompt_tokens": 2, "max_tokens": 62},
    {"truncate_prompt_tokens": 64, "max_tokens": 1},
    {"stop": ["a"], "include_stop_str_in_output": True},
    {"stop": "a", "ignore_eos": True, "stop_token_ids": [7], "min_tokens": 1, "seed": 7},
    {"temperature": 0, "top_k": 1, "top_p": 0.9, "min_p": 0.1, "repetition_penalty": 1.1, "seed": 1},
    {"presence_penalty": 1, "frequency_penalty": -1, "logit_bias": {"5": 5.5}},
    {
        "user": "me",
        "metadata": {"a": "b"},
        "tools": [],
        "tool_choice": "auto",
        "response_format": {"type": "text"},
    },
    {"priority": "batch", "cache_salt": "mine", "return_token_ids": True},
    {"guided_regex": "a+", "n": 2, "temperature": 0, "ignore_eos": True, "min_tokens": 3},
    {"guided_regex": "a+", "stop": None, "stop_token_ids": []},
    {"allowed_token_ids": [1, 2], "bad_words": ["the"], "logit_bias": {"5": 5.5}, "min_tokens": 2},
    {"guided_regex": "a+", "allowed_token_ids": [5], "bad_words": ["b"]},
]
# More than one thing is wrong; which one is named says in what order things are checked.
SEVERAL: list[dict[str, Any]] = [
    {"temperature": -1, "top_p": 2},
    {"top_p": 2, "temperature": -1},
    {"n": 0, "temperature": "x"},
    {"foo": 1, "bar": 2},
    {"foo": 1, "tools": [1]},
    {"tools": [1], "foo": 1},
    {"tools": [1], "echo": True},
    {"tools": [1], "temperature": "x"},
    {"temperature": "x", "tools": [1]},
    {"temperature": "x", "foo": 1},
    {"temperature": "x", "truncate_prompt_tokens": 0},
    {"model": "other", "temperature": "x"},
    {"model": 5, "temperature": "x"},
    {"stop": 5, "stop_token_ids": "x", "logit_bias": 5},
    {"stop": 5, "temperature": "x"},
    {"priority": "urgent", "cache_salt": ""},
    {"stream": "x", "temperature": "x"},
    {"stream": "x", "stream_options": 5},
    {"best_of": 9, "n": "x"},
    {"best_of": 9, "temperature": "x"},
    {"logprobs": "x", "max_tokens": "x"},
    {"max_tokens": 0, "n": 0},
    {"min_tokens": -1, "max_tokens": 0},
    {"max_tokens": 1000, "temperature": "x"},
    {"stop": ["a", "b", "c"], "stop_token_ids": [1, 2, 3, 4]},
    {"guided_regex": "a+", "stop": "a"},
    {"response_format": {"type": "json_object"}, "stop_token_ids": [7]},
    {"guided_regex": "a+", "guided_choice": ["a"]},
    {"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}},
    {"guided_regex": "(", "temperature": "x"},
]
RAW: list[bytes] = [
    b"", b" ", b"null", b"[]", b"5", b'"x"', b"{", b"{}", b'{"prompt": NaN}', b'{"prompt": "a", "temperature": NaN}',
    b'{"prompt": "a", "temperature": Infinity}', b'{"prompt": "a", "temperature": 1e400}', b'{"prompt": "\\ud800"}',
    b'{"prompt": "a", "max_tokens": 123456789012345678901234567890}', b'{"prompt": "a", "prompt": "b"}', b"\xff\xfe",
    b'{"prompt": "a",}', b"{'prompt': 'a'}", b'{"prompt": "\xc3\x28"}', b'\xef\xbb\xbf{"prompt": "a"}',
    b'{"prompt": "a", "temperature": -0}', b'{"prompt": "a", "temperature": 1E0}', b'{"prompt": "a"} {}',
    b'{"a":' * 40 + b"1" + b"}" * 40, b'{"user":' + b"[" * 31 + b"]" * 31 + b', "prompt": "a"}',
    b'{"user":' + b"[" * 3 + b"]" * 3 + b', "prompt": "a"}', b'{"user":' + b"[" * 4 + b"]" * 4 + b', "prompt": "a"}',
    b'{"prompt": "a", "user": "' + b"x" * (1 << 14) + b'"}', b'{"prompt": "a", "user": [' + b"1," * 1100 + b"1]}",
]  # fmt: skip
HEADERS = [{"x-request-id": value} for value in ("mine", "", "x" * 256, "x" * 257, "a\tb")]


@dataclass(frozen=True)
class Case:
    """One body for one endpoint of one router."""

    settings: str
    path: str
    name: str
    body: bytes
    headers: tuple[tuple[str, str], ...] = ()


def _base(path: str) -> dict[str, Any]:
    if path == CHAT:
        return {"messages": [USER]}
    return {"prompt": [5, 6, 7, 8]}


def _named(patch: Any) -> str:
    """Short, and different for different patches."""
    name = patch if isinstance(patch, bytes) else orjson.dumps(patch)
    return (
        name.decode("latin-1") if len(name) <= 160 else f"{name[:100].decode('latin-1')}… {len(name)} bytes"
    )


def _case(settings: str, path: str, patch: dict[str, Any], **more: Any) -> Case:
    return Case(settings, path, _named(patch), orjson.dumps({**_base(path), **patch}), **more)


def _fields(settings: str, path: str, fields: Iterable[str], kinds: list[Any]) -> Iterator[Case]:
    for field in fields:
        for value in (*kinds, *SPECIAL.get(field, ())):
            yield _case(settings, path, {field: _in_json(value)})


def _field_cases(path: str) -> Iterator[Case]:
    """For chats fewer kinds: the endpoints share most fields."""
    yield from _fields("strict", path, SHARED, KINDS if path == COMPLETION else FEW_KINDS)
    yield from _fields("strict", path, NEUTRAL, FEW_KINDS)
    yield from _fields("strict", path, STRUCTURED, FEW_KINDS)
    yield from _fields("strict", path, HARMLESS, FEW_KINDS[-3:])
    for field in UNKNOWN:
        if field not in _base(path):
            yield _case("strict", path, {field: 1})
            yield _case("strict", path, {field: None})


def _in_json(value: Any) -> Any:
    """Whole numbers that JSON parsers read as floats are written as such."""
    return float(value) if type(value) is int and not -(2**63) <= value < 2**64 else value


def _strict_cases() -> Iterator[Case]:
    for path in (CHAT, COMPLETION):
        yield from _field_cases(path)
        for patch in (*TOGETHER, *SEVERAL):
            yield _case("strict", path, patch)
        for raw in RAW:
            yield Case("strict", path, _named(raw), raw)
        for headers in HEADERS:
            yield _case(
                "strict",
                path,
                {"user": str(headers)[:40] + str(len(str(headers)))},
                headers=tuple(headers.items()),
            )
    for prompt in PROMPTS:
        yield _case("strict", COMPLETION, {"prompt": prompt})
    prompts: tuple[Any, ...] = (["a", "b"], "a " * 500, [1] * 100, [[1] * 100], [])
    short: dict[str, Any] = {"truncate_prompt_tokens": 3}
    patches: tuple[dict[str, Any], ...] = (short, {"temperature": "x"}, {"n": 4, "logprobs": 5}, {"foo": 1})
    for prompt, patch in itertools.product(prompts, patches):
        yield _case("strict", COMPLETION, {"prompt": prompt, **patch})
    for messages in MESSAGES:
        yield _case("strict", CHAT, {"messages": messages})
    long = {"role": "user", "content": "a " * 500}
    chats: tuple[Any, ...] = ([], [None], [{"role": "x"}], [USER] * 64, [long])
    patches = (short, {"temperature": "x"}, {"reasoning_effort": "hard"}, {"foo": 1})
    for chat, patch in itertools.product(chats, patches):
        yield _case("strict", CHAT, {"messages": chat, **patch})


def _other_cases() -> Iterator[Case]:
    """Where the settings make a difference."""
    for settings, path in itertools.product(("tolerant", "least"), (CHAT, COMPLETION)):
        fields = (
            "priority", "stream_options", "n", "stop", "stop_token_ids", "logit_bias", "allowed_token_ids", "bad_words",
            "logprobs", "foo", "echo",
        )  # fmt: skip
        yield from _fields(settings, path, fields, FEW_KINDS if path == COMPLETION else [])
        for patch in (*TOGETHER, *SEVERAL):
            yield _case(settings, path, patch)
        for raw in RAW:
            yield Case(settings, path, _named(raw), raw)
    for settings in ("tolerant", "least"):
        for prompt in PROMPTS:
            yield _case(settings, COMPLETION, {"prompt": prompt})


def cases() -> list[Case]:
    made = {(one.settings, one.path, one.name): one for one in (*_strict_cases(), *_other_cases())}
    return list(made.values())
