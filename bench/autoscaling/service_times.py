"""Service times of the simulated workers, fitted to figures that `make bench` measured (docs/results.md: engine,
hand-off and prefix sections of 2026-11-21; a worker is one thread of an AMD EPYC, the model 16 layers in bf16).

    prefill of 2,048 tokens in a cluster    2,611 ms, a quarter of it attention, which grows with the square
    decode, batch 1, 128 tokens each        14 ms a step
    decode, batch 8, 512 tokens each        27 ms a step
    decode, batch 16, 128 tokens each       499 tokens/s, that is 32.06 ms a step

The three decode figures determine base, each sequence and each resident token.
"""

from __future__ import annotations

from dataclasses import dataclass

_PROMPT_TOKENS, _PROMPT_SECONDS, _ATTENTION_SHARE = 2048, 2.611, 0.25


@dataclass(frozen=True)
class ServiceTimes:
    prefill_token_seconds: float = (1 - _ATTENTION_SHARE) * _PROMPT_SECONDS / _PROMPT_TOKENS
    prefill_token_pair_seconds: float = _ATTENTION_SHARE * _PROMPT_SECONDS / _PROMPT_TOKENS**2
    step_base_seconds: float = 0.012796
    step_sequence_seconds: float = 0.0010135
    step_resident_token_seconds: float = 1.488e-6
    kv_tokens: float = 65_536.0  # a pool of 2 GiB (the largest that `baton up` makes) at 32 KiB a token

    def step_seconds(self, batch: float, resident_tokens: float) -> float:
        return (
            self.step_base_seconds
            + self.step_sequence_seconds * batch
            + self.step_resident_token_seconds * resident_tokens
        )

    def prefill_seconds(self, tokens: float) -> float:
        return self.prefill_token_seconds * tokens + self.prefill_token_pair_seconds * tokens**2
