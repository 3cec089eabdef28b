"""Sampling settings of every kind."""

from __future__ import annotations

import random

from engine.request import SamplingParams

VOCAB = 400


def some_params(rng: random.Random) -> SamplingParams:
    return SamplingParams(
        temperature=rng.choice([0.0, 1e-3, 0.3, 0.7, 1.0, 1.2, 5.0, 100.0]),
        top_k=rng.choice([0, 0, 1, 2, 7, 40, 300, VOCAB, 2**31]),
        top_p=rng.choice([1.0, 1.0, 0.999, 0.95, 0.5, 0.01]),
        min_p=rng.choice([0.0, 0.0, 1e-6, 0.05, 0.9]),
        repetition_penalty=rng.choice([1.0, 1.0, 0.5, 1.3]),
        presence_penalty=rng.choice([0.0, 0.0, -1.5, 2.0]),
        frequency_penalty=rng.choice([0.0, 0.0, 0.7, -2.0]),
        logit_bias=rng.choice([{}, {}, {3: 4.0, 17: -9.0}]),
        seed=rng.randrange(2**64),
    )
