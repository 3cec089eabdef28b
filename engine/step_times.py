"""Histograms of steps: duration, tokens, sequences."""

from __future__ import annotations

from typing import Literal

from cluster.telemetry.metrics import worker as metrics


class StepTimes:
    """Written by one thread, read by any."""

    def __init__(self) -> None:
        self.total_seconds = {"prefill": 0.0, "decode": 0.0}
        self.seconds = {kind: metrics.ENGINE_STEP_SECONDS.create() for kind in self.total_seconds}
        self.tokens = metrics.ENGINE_STEP_TOKENS.create()
        self.requests = metrics.ENGINE_STEP_REQUESTS.create()

    def add(self, tokens: int, sequences: int, seconds: float) -> None:
        """Record a step. One with more tokens than sequences contains a prompt."""
        kind: Literal["prefill", "decode"] = "prefill" if tokens > sequences else "decode"
        self.total_seconds[kind] += seconds
        self.seconds[kind].observe(seconds)
        self.tokens.observe(tokens)
        self.requests.observe(sequences)
