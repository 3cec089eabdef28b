"""Every endpoint that generates, embeds or tokenises, with a short request: attacks on what they share meet each."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from router.frontends.http.gate import RERANK, SCORE


@dataclass(frozen=True)
class Endpoint:
    path: str
    made: Callable[[str], dict[str, Any]]
    field: str = "prompt"  # that errors name for a text that is too long; "" = it takes none
    streams: bool = False
    dispatched: bool = False  # a worker serves it

    def body(self, text: str = "abc", **more: Any) -> bytes:
        return json.dumps(self.made(text) | more).encode()


def _chat(text: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}]}


ENDPOINTS = {
    "completion": Endpoint(
        "/v1/completions", lambda text: {"prompt": text, "max_tokens": 2}, streams=True, dispatched=True
    ),
    "chat": Endpoint(
        "/v1/chat/completions",
        lambda text: _chat(text) | {"max_tokens": 2},
        "messages",
        streams=True,
        dispatched=True,
    ),
    "response": Endpoint(
        "/v1/responses",
        lambda text: {"input": text, "max_output_tokens": 2},
        "input",
        streams=True,
        dispatched=True,
    ),
    "message": Endpoint(
        "/v1/messages",
        lambda text: _chat(text) | {"max_tokens": 2},
        "messages",
        streams=True,
        dispatched=True,
    ),
    "embedding": Endpoint("/v1/embeddings", lambda text: {"input": text}, "input", dispatched=True),
    **{
        path: Endpoint(path, lambda text: {"text_1": "abc", "text_2": text}, "text_2", dispatched=True)
        for path in SCORE
    },
    **{
        path: Endpoint(path, lambda text: {"query": "abc", "documents": [text]}, "documents", dispatched=True)
        for path in RERANK
    },
    "count of a response": Endpoint("/v1/responses/input_tokens", lambda text: {"input": text}, "input"),
    "count": Endpoint("/v1/messages/count_tokens", _chat, "messages"),
    "tokenize": Endpoint("/tokenize", lambda text: {"prompt": text}),
    "tokenize a chat": Endpoint("/tokenize", _chat, "messages"),
    "detokenize": Endpoint("/detokenize", lambda text: {"tokens": [5]}, ""),
}
PATHS = sorted({one.path for one in ENDPOINTS.values()})
CHATS = [name for name, one in ENDPOINTS.items() if one.field and "prompt" not in one.made("")]


def param(answer: Any) -> str:
    """The field that an error names, or in Anthropic's form its text begins with."""
    error = answer.json()["error"]
    return str(error["param"] if "param" in error else error["message"].partition(":")[0])
