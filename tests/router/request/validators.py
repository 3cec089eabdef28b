"""A validator with small limits, and sequences whose elements it must not read."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, overload

from cluster.config.router import RouterConfig
from router.request.validator import Validator

VOCAB, CONTEXT = 100, 64
CONFIG = RouterConfig(
    model=Path("/models/m"),
    max_choices=3,
    max_stop_strings=2,
    max_stop_string_characters=10,
    max_stop_token_ids=4,
    max_logit_bias=3,
    max_logprobs=5,
    request_seconds=60.0,
)


def validator(generation: dict[str, Any] | None = None, **config: Any) -> Validator:
    text: Any = SimpleNamespace(
        vocab_size=VOCAB, max_position_embeddings=CONTEXT, generation=generation or {}, has_head=True
    )
    return Validator(CONFIG.model_copy(update=config), text)


class Walked(Exception):
    """An element was read."""


class Long(Sequence[int]):
    """A sequence with a length whose elements must not be read."""

    def __init__(self, length: int):
        self._length = length

    def __len__(self) -> int:
        return self._length

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[int]: ...
    def __getitem__(self, index: Any) -> Any:
        raise Walked

    def __iter__(self) -> Iterator[int]:
        raise Walked
