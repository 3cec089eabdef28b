"""Requests of the clients: mixed prompts, some with a common beginning, greedy and sampled."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

from engine.request import SamplingParams
from tests.harness.checkpoints import VOCAB

SHARED_PREFIXES = 4


@dataclass(frozen=True)
class Request:
    prompt: list[int]
    max_tokens: int
    temperature: float
    top_p: float
    top_k: int
    seed: int | None  # None: the router draws one and says which

    def params(self, seed: int | None) -> SamplingParams:
        return SamplingParams(
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            seed=seed or 0,
            max_tokens=self.max_tokens,
            ignore_eos=True,
        )

    def options(self) -> dict[str, Any]:
        """Of the Baton clients."""
        chosen: dict[str, Any] = {
            "max_tokens": self.max_tokens,
            "temperature": self.temperature,
            "ignore_eos": True,
            "seed": self.seed,
        }
        if self.temperature > 0:
            chosen |= {"top_p": self.top_p, "top_k": self.top_k}
        return chosen


def draw_request(rng: random.Random, *, need_seed: bool = False) -> Request:
    prefix: list[int] = []
    if rng.random() < 0.6:
        shared = random.Random(rng.randrange(SHARED_PREFIXES))
        prefix = [shared.randrange(3, VOCAB) for _ in range(shared.randrange(40, 240))]
    prompt = prefix + [rng.randrange(3, VOCAB) for _ in range(rng.randrange(1, 120))]
    length = rng.choice((rng.randrange(1, 20), rng.randrange(100, 300), rng.randrange(300, 600)))
    if rng.random() < 0.5:
        return Request(prompt, length, 0.0, 1.0, 0, rng.randrange(2**32) if need_seed else None)
    seed = rng.randrange(2**32) if need_seed or rng.random() < 0.6 else None
    top_p, top_k = rng.choice(((1.0, 0), (0.9, 0), (1.0, 40), (0.95, 50)))
    return Request(prompt, length, rng.choice((0.7, 1.0, 1.2)), top_p, top_k, seed)


def draw_long_request(rng: random.Random) -> Request:
    """Some hundred tokens in, many hundreds out: what fills a decode worker."""
    prompt = [rng.randrange(3, VOCAB) for _ in range(rng.randrange(150, 300))]
    return Request(prompt, rng.randrange(450, 600), 0.0, 1.0, 0, None)
