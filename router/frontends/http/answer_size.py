"""How many bytes an answer of known length may have, by its request."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from router.request.completion import Completion

# Of a token's log probability, or of an alternative's: short in completions; with bytes and all digits in chats
MIN_ENTRY_BYTES = 24
MAX_ENTRY_BYTES = 96
MIN_NUMBER_BYTES, MAX_NUMBER_BYTES = 5, 16  # of a vector: in base64; as JSON, "-1.2345678e-05,"
TOKEN_BYTES = 16  # of text, with what JSON escapes: few tokens have as many
TOKEN_ID_BYTES = 7  # of a token id in a list


class AnswerSize(NamedTuple):
    """Estimates, as a token may have hundreds of bytes: the answer itself is counted once it is there."""

    least: int
    most: int


def answer_size(completions: Sequence[Completion], texts: int, dimensions: int = 0) -> AnswerSize:
    """`texts`: bytes of what the answer repeats of its request. `dimensions`: of its vectors, one for each completion."""
    numbers = len(completions) * dimensions
    least, most = texts + numbers * MIN_NUMBER_BYTES, texts + numbers * MAX_NUMBER_BYTES
    for one in completions:
        sampling = one.sampling
        of_prompt = 0
        if sampling.prompt_logprobs:
            of_prompt = len(one.prompt_tokens) * (1 + sampling.prompt_top_logprobs)
        of_token = 1 + sampling.top_logprobs if sampling.logprobs else 0
        tokens = 0 if one.prompt_only else sampling.max_tokens
        least += one.n * (of_prompt + _certain_tokens(one) * of_token) * MIN_ENTRY_BYTES
        most += one.n * ((of_prompt + tokens * of_token) * MAX_ENTRY_BYTES + tokens * TOKEN_BYTES)
    return AnswerSize(least, most)


def _certain_tokens(completion: Completion) -> int:
    """That each choice generates, whatever they are."""
    sampling = completion.sampling
    if completion.prompt_only or completion.stop or completion.grammar is not None:
        return 0
    if sampling.ignore_eos and not sampling.stop_token_ids:
        return sampling.max_tokens
    return sampling.min_tokens
