"""What a validator reads of a small model."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

TEXT: Any = SimpleNamespace(
    vocab_size=100, max_position_embeddings=64, generation={}, most_bytes=None, has_head=True
)
