"""How many tokens a request took: at its end, and in each chunk of a stream that asks for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from router.completion import Delta, Outcome


@dataclass(frozen=True)
class StreamUsage:
    """What `stream_options` asks for."""

    at_end: bool = False  # a last chunk without choices
    continuous: bool = False  # each chunk's own, of what was sent so far


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
    """Of one stream, over all its choices: its last figures are those of the whole answer.

    How many prompt tokens were cached is known at the end only.
    """

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
