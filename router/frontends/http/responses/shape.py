"""OpenAI's response object, as it is at the begin, at the end, or where an error ends it."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import orjson

from cluster.errors import BatonError, DeadEndError, InvalidRequestError, OverloadedError, cut
from router.frontends.http.openai.shapes import baton, token_logprobs
from router.frontends.http.responses.request import ENCRYPTED_REASONING, LOGPROBS, ResponseRequest
from router.link.token import Token
from router.request.completion import Completion, Outcome
from router.text.tokenizer import ModelText

_PLAIN_TEXT = {"type": "text"}


def _id() -> str:
    return f"resp_{secrets.token_hex(24)}"


@dataclass(frozen=True)
class ResponseShape:
    completion: Completion
    text: ModelText
    echo: bytes  # JSON members that repeat the request, of `echoed`; methods get what stands for them
    logprobs: bool
    encrypt_reasoning: bool
    admin: bool
    id: str = field(default_factory=_id)
    created: int = field(default_factory=lambda: int(time.time()))

    @classmethod
    def of(
        cls, request: ResponseRequest, completion: Completion, text: ModelText, *, admin: bool
    ) -> ResponseShape:
        return cls(
            completion,
            text,
            orjson.dumps(echoed(request, completion))[1:-1],
            LOGPROBS in request.include,
            ENCRYPTED_REASONING in request.include,
            admin,
        )

    def begun(self, echo: bytes) -> orjson.Fragment:
        return self._response(echo, "in_progress")

    def ended(
        self, echo: bytes, output: Sequence[dict[str, Any]], outcome: Outcome, *, whole: bool
    ) -> orjson.Fragment:
        """`whole`: max_output_tokens did not end it."""
        more = {"usage": _usage(outcome), "baton": baton(outcome, admin=self.admin)}
        if not whole:
            details = {"reason": "max_output_tokens"}
            return self._response(echo, "incomplete", output=output, incomplete_details=details, **more)
        return self._response(echo, "completed", output=output, completed_at=int(time.time()), **more)

    def failed(self, echo: bytes, output: Sequence[dict[str, Any]], error: BatonError) -> orjson.Fragment:
        shown = {"code": _code(error), "message": cut(error.message)}
        return self._response(echo, "failed", output=output, error=shown)

    def _response(self, echo: bytes, status: str, **more: Any) -> orjson.Fragment:
        given = {
            "id": self.id,
            "object": "response",
            "created_at": self.created,
            "status": status,
            "completed_at": None,
            "error": None,
            "incomplete_details": None,
            "output": [],
            "usage": None,
            **more,
        }
        return orjson.Fragment(orjson.dumps(given)[:-1] + b"," + echo + b"}")

    def token_logprobs(self, tokens: Sequence[Token]) -> list[dict[str, Any]]:
        return token_logprobs(tokens, self.text.pieces) if self.logprobs else []


def echoed(request: ResponseRequest, completion: Completion) -> dict[str, Any]:
    """The fields of its request that a response repeats, with the values that were used."""
    reasoning, text, sampling = request.reasoning, request.text, completion.sampling
    asked = text.format.asked if text is not None and text.format is not None else _PLAIN_TEXT
    return {
        "background": False,
        "instructions": request.instructions,
        "max_output_tokens": request.max_output_tokens,
        "max_tool_calls": None,
        "metadata": request.metadata or {},
        "model": completion.model,
        "parallel_tool_calls": request.parallel_tool_calls is not False,
        "previous_response_id": None,
        "reasoning": {
            "effort": reasoning.effort if reasoning is not None else None,
            "summary": None,
        },
        "service_tier": "default",
        "store": False,
        "temperature": _exact(request, "temperature", sampling.temperature),
        "text": {"format": asked},
        "tool_choice": request.tool_choice or "auto",
        "tools": request.tools,
        "top_logprobs": request.top_logprobs or 0,
        "top_p": _exact(request, "top_p", sampling.top_p),
        "truncation": request.truncation or "disabled",
    }


def _exact(request: ResponseRequest, name: str, used: float) -> float:
    """The number as the request has it, else the one that was used, which has 32 bits."""
    given = getattr(request, name) if name in request.model_fields_set else None
    return round(used, 7) if given is None else float(given)


def _usage(outcome: Outcome) -> dict[str, Any]:
    usage = outcome.usage
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }


def _code(error: BatonError) -> str:
    """The error's code, one of those that clients know."""
    if isinstance(error, OverloadedError):
        return "rate_limit_exceeded"
    of_request = isinstance(error, InvalidRequestError | DeadEndError)
    return "invalid_prompt" if of_request else "server_error"
