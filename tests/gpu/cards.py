"""Shapes of the models that cards are measured with."""

from __future__ import annotations

from bench.checkpoint import ModelShape

CONTEXT = 36_864
CARDS = {
    "8B": ModelShape(
        32, 4096, heads=32, kv_heads=8, head_dim=128, intermediate=14336, vocab=128256, context_tokens=CONTEXT
    ),
    "1B": ModelShape(
        16, 2048, heads=32, kv_heads=8, head_dim=64, intermediate=8192, vocab=128256, context_tokens=CONTEXT
    ),
}
