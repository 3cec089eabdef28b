"""Options of a request for embeddings, read by both frontends."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal

from pydantic import Field

from cluster.protocol.pooling import Embedding
from router.request.fields import RequestModel, Within, refuse
from router.request.options import Flag, Priority, TruncatePromptTokens


class InputOptions(RequestModel):
    """Of requests whose inputs are embedded."""

    truncate_prompt_tokens: TruncatePromptTokens = Field(
        None, description="of each input; -1: as many as the model takes"
    )
    truncation_side: Literal["left", "right"] | None = Field(
        None, description="where tokens are left out; default: left, the input's end is kept"
    )
    add_special_tokens: Flag = Field(None, description="default: true")
    priority: Priority | None = None

    def kept(self, tokens: Sequence[int], longest: int) -> Sequence[int]:
        """The tokens of one input that `truncate_prompt_tokens` leaves."""
        count = longest if self.truncate_prompt_tokens == -1 else self.truncate_prompt_tokens
        if count is None:
            return tokens
        return tokens[:count] if self.truncation_side == "right" else tokens[-count:]

    def dimensions_of(self, how: Embedding) -> int:
        """The dimensions of each vector."""
        return how.dimensions


class EmbeddingOptions(InputOptions):
    """Frontends read `input`, a list of texts and of token ids, each from its own form."""

    input: Sequence[str | Sequence[int]]
    dimensions: Annotated[int, Within(1, 2**31 - 1)] | None = Field(
        None, description="of shorter vectors, where the checkpoint declares them (Matryoshka)"
    )

    def dimensions_of(self, how: Embedding) -> int:
        """The dimensions of each vector. Raises InvalidRequestError unless the model was trained for that many."""
        asked = self.dimensions
        if asked is None or asked == how.dimensions:
            return how.dimensions
        if how.shorter is None:
            text = f"this model's vectors have {how.dimensions}; its checkpoint declares no shorter ones"
            raise refuse("dimensions", text, how.dimensions)
        if asked > how.dimensions:
            raise refuse("dimensions", f"this model's vectors have {how.dimensions}", how.dimensions)
        if how.shorter and asked not in how.shorter:
            allowed = ", ".join(map(str, how.shorter))
            raise refuse("dimensions", f"this model's checkpoint allows {allowed[:200]}", allowed[:200])
        return asked
