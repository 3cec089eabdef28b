"""The options that exclude tokens from answers, as vLLM has them: of completions and chats over HTTP, and of gRPC."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import numpy as np
from pydantic import AfterValidator, Field

from cluster.protocol.block_hash import pack_tokens
from router.request.fields import AtMost, Length, late, refuse, wrong
from router.request.options import GenerationOptions, TokenId


@dataclass(frozen=True)
class Exclusions:
    """What keeps tokens out of all answers of a request, as workers get it: fields of `SamplingParams` in the proto."""

    allowed_tokens: bytes = b""
    bad_words: Sequence[bytes] = ()


NO_EXCLUSIONS = Exclusions()


def _some(value: list[int]) -> list[int]:
    if not value:
        raise wrong("must name at least one token")
    return value


def _visible(value: str) -> str:
    if not value.strip():
        raise wrong("must have a character that is no white space")
    return value


class TokenOptions(GenerationOptions):
    allowed_token_ids: (
        Annotated[list[TokenId], AfterValidator(_some), late(minItems=1), AtMost("max_allowed_token_ids")]
        | None
    ) = Field(None, description="the only tokens that answers may have")
    bad_words: (
        Annotated[
            list[
                Annotated[
                    str,
                    Length(1, "max_bad_word_characters"),
                    AfterValidator(_visible),
                    Field(json_schema_extra={"pattern": "\\S"}),
                ]
            ],
            AtMost("max_bad_words"),
        ]
        | None
    ) = Field(None, description="texts that answers may not have, as their tokens")

    @property
    def allowed_ids(self) -> Sequence[int] | None:
        return self.allowed_token_ids

    @property
    def excluded_words(self) -> Sequence[str]:
        return self.bad_words or ()


def exclusions_of(
    allowed: Sequence[int] | None, words: Sequence[Sequence[int]], last_token: int
) -> Exclusions:
    """`words`: the token ids of each. `last_token`: of the vocabulary. Raises InvalidRequestError."""
    for name, ids in (("allowed_token_ids", allowed or ()), *(("bad_words", word) for word in words)):
        if ids and not (min(ids) >= 0 and max(ids) <= last_token):
            raise refuse(name, f"token ids must lie in 0 … {last_token}", last_token)
    return Exclusions(b"" if allowed is None else _bitmap(allowed), [pack_tokens(word) for word in words])


def _bitmap(ids: Sequence[int]) -> bytes:
    """A bit for each token id up to the largest, the lowest first."""
    bits = np.zeros(max(ids) + 1, dtype=np.uint8)
    bits[np.array(ids)] = 1
    return np.packbits(bits, bitorder="little").tobytes()
