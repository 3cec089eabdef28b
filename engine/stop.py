"""Ends of a choice that its token ids decide. The router applies stop strings."""

from __future__ import annotations

from engine.request import FinishReason, SamplingParams


def finish_reason(
    token: int, output_count: int, total: int, params: SamplingParams, eos: tuple[int, ...], max_len: int
) -> FinishReason | None:
    """`output_count` and `total` include `token`."""
    ends = token in params.stop_token_ids or (token in eos and not params.ignore_eos)
    if ends and output_count >= params.min_tokens:
        return FinishReason.STOP
    if output_count >= params.max_tokens or total >= max_len:
        return FinishReason.LENGTH
    return None


def forbidden(output_count: int, params: SamplingParams, eos: tuple[int, ...]) -> tuple[int, ...]:
    """Ids that would end the choice before min_tokens, for the next token."""
    if output_count + 1 >= params.min_tokens:
        return ()
    ends = () if params.ignore_eos else eos
    return tuple({*ends, *params.stop_token_ids})
