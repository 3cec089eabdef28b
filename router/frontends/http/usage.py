"""Token usage of a request: at its end, and in each chunk of a stream with continuous_usage_stats."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import orjson

from router.request.completion import Delta, Outcome


def usage(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    prompt = sum(outcome.usage.prompt_tokens for outcome in outcomes)
    completion = sum(outcome.usage.completion_tokens for outcome in outcomes)
    cached = sum(outcome.usage.cached_tokens for outcome in outcomes)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


class UsageSoFar:
    """Running usage of one stream over all its choices. The number of cached prompt tokens is known only at the end."""

    def __init__(self, prompt_tokens: int):
        self._prompt = prompt_tokens
        self._completion = 0

    def with_delta(self, delta: Delta) -> bytes:
        self._completion += len(delta.tokens)
        total = self._prompt + self._completion
        return orjson.dumps(
            {
                "prompt_tokens": self._prompt,
                "completion_tokens": self._completion,
                "total_tokens": total,
            }
        )
