"""gRPC messages for the golden table."""

from __future__ import annotations

import math
from typing import Any

from tests.router.frontends.golden.bodies import CONTEXT
from wire import inference_pb2 as pb
from wire.common_pb2 import Choices, Grammar

FLOATS = [
    0.0,
    1e-46,
    1e-9,
    0.5,
    1.0,
    1.001,
    2.0,
    2.1,
    -2.0,
    -2.1,
    100.0,
    100.1,
    -1e-9,
    math.nan,
    math.inf,
    -math.inf,
]
COUNTS = [0, 1, 2, 4, 5, 6, 7, 60, 63, 64, 4095, 4096, 4097, 2**31, 2**31 + 1, 2**32 - 1]
OPTIONS: dict[str, list[Any]] = {
    **dict.fromkeys(
        ["temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"], FLOATS
    ),
    **dict.fromkeys(["max_tokens", "top_k", "n", "min_tokens", "logprobs", "prompt_logprobs"], COUNTS),
    "seed": [0, 1, 2**63, 2**64 - 1],
    "stop": [["a"], ["a", "b"], ["a", "b", "c"], [""], ["x" * 8], ["x" * 9]],
    "stop_token_ids": [[1, 2, 3], [1, 2, 3, 4], [4095], [4096], [1] * 100_000],
    "ignore_eos": [True, False],
    "logit_bias": [
        {1: 100.0, 2: -100.0}, {1: 1, 2: 2, 3: 3}, {4095: 0}, {4096: 0}, {1: 100.1}, {1: math.nan}, {1: math.inf},
    ],
    "allowed_token_ids": [[0, 7, 4095], [1, 2, 3, 4], [4096], [1] * 100_000],
    "bad_words": [["the"], ["the", " a cat"], ["a", "b", "c"], ["x" * 8], ["x" * 9], [""], ["a", " "]],
    "include_stop_text": [True, False],
    "priority": [0, 5, -5, 32768, 32769, -32768, -32769],
    "grammar": [
        Grammar(json_schema='{"type":"null"}'), Grammar(json_schema='{"type":"nil"}'), Grammar(json_schema="{"),
        Grammar(regex="a+"), Grammar(regex="("), Grammar(regex=""), Grammar(lark=""), Grammar(json_schema=""),
        Grammar(choice=Choices(texts=["a", "b"])), Grammar(choice=Choices()),
        Grammar(lark='start: "a"'), Grammar(lark="x"), Grammar(regex="x" * 140_000), Grammar(),
        Grammar(lark='{"grammars": []}'), Grammar(lark='start: %json {"x-guidance": {}}'),
    ],
}  # fmt: skip
TOGETHER: list[dict[str, Any]] = [
    {},
    {"max_tokens": 5, "min_tokens": 5},
    {"max_tokens": 5, "min_tokens": 6},
    {"n": 4, "logprobs": 5, "max_tokens": 50},
    {"n": 4, "logprobs": 5, "max_tokens": 51},
    {"n": 4, "prompt_logprobs": 5, "max_tokens": 50},
    {"temperature": 0.0, "top_k": 0, "seed": 7, "stop": ["a"], "include_stop_text": True},
    {"temperature": -1.0, "n": 0},
    {"grammar": Grammar(regex="a+"), "stop": ["a"]},
]


def _chat(*turns: tuple[str, str]) -> dict[str, Any]:
    return {
        "chat": pb.ChatMessages(messages=[pb.ChatMessage(role=role, content=text) for role, text in turns])
    }


def _ids(*ids: int) -> pb.TokenIds:
    return pb.TokenIds(ids=ids)


REQUESTS: list[dict[str, Any]] = [
    {},
    {"text": ""},
    {"text": "abc"},
    {"text": "a " * 500},
    {"text": "x" * 5000},
    {"token_ids": _ids()},
    {"token_ids": _ids(1)},
    {"token_ids": _ids(4095)},
    {"token_ids": _ids(4096)},
    {"token_ids": _ids(*[1] * (CONTEXT - 1))},
    {"token_ids": _ids(*[1] * CONTEXT)},
    _chat(),
    _chat(("user", "hello")),
    _chat(("developer", "be brief"), ("user", "hello"), ("assistant", ""), ("user", "more")),
    _chat(("user", "hello"), ("tool", "5")),
    _chat(("", "hello")),
    _chat(*[("user", "a")] * CONTEXT),
    *({"text": "abc", **more} for more in (
        {"model": "tiny"}, {"model": "other"}, {"request_id": "mine"}, {"request_id": "x" * 257}, {"request_id": "a\nb"},
        {"resume_tokens": _ids(1, 2)}, {"resume_tokens": _ids(4096)}, {"resume_tokens": _ids(*[1] * CONTEXT)},
        {"resume_tokens": _ids(1), "options": pb.GenerateOptions(n=2)},
        {"resume_tokens": _ids(1, 2), "options": pb.GenerateOptions(max_tokens=2)},
        {"resume_tokens": _ids(1, 2), "options": pb.GenerateOptions(max_tokens=3)},
        {"explain": True}, {"reconnects": 3}, {"resume_ticket": b"ticket"},
    )),
]  # fmt: skip


def messages() -> dict[str, pb.GenerateRequest]:
    """By name."""
    options = [{field: value} for field, values in OPTIONS.items() for value in values] + TOGETHER
    made = {
        _named(one): pb.GenerateRequest(token_ids=_ids(5, 6, 7, 8), options=pb.GenerateOptions(**one))
        for one in options
    }
    return made | {_named(one): pb.GenerateRequest(**one) for one in REQUESTS}


def _named(fields: dict[str, Any]) -> str:
    name = ", ".join(f"{key}={value!r}" for key, value in fields.items()).replace("\n", " ") or "nothing"
    return name if len(name) <= 160 else f"{name[:100]}… {len(name)} characters"
