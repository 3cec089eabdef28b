"""Converts between wire messages and the engine's types."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterable
from dataclasses import fields

from cluster.grammar.spec import grammar_from_wire
from cluster.protocol.block_hash import unpack_tokens
from cluster.protocol.pooling import Pooling
from engine.request import EngineRequest, FinishReason, SamplingParams, TokenOutput
from wire import common_pb2
from worker.attempt_log import AttemptLog

_FINISH_TO_WIRE = {
    None: common_pb2.FINISH_REASON_UNSPECIFIED,
    FinishReason.STOP: common_pb2.FINISH_REASON_STOP,
    FinishReason.LENGTH: common_pb2.FINISH_REASON_LENGTH,
}
_SAMPLING = tuple(field.name for field in fields(SamplingParams))
_FINISH_FROM_WIRE = {wire: reason for reason, wire in _FINISH_TO_WIRE.items()}


def outcome_counts() -> Counter[str]:
    """Counters of the outcomes of attempts, all 0."""
    values = common_pb2.AttemptOutcome.values()
    return Counter({outcome_name(value): 0 for value in values if value})


def outcome_name(outcome: common_pb2.AttemptOutcome.ValueType) -> str:
    """The outcome as in metrics and spans: done, aborted, refused, …"""
    return common_pb2.AttemptOutcome.Name(outcome).removeprefix("ATTEMPT_OUTCOME_").lower()


def sampling_from_wire(params: common_pb2.SamplingParams) -> SamplingParams:
    values = {name: getattr(params, name) for name in _SAMPLING}
    unset_is_1 = {name: values[name] or 1.0 for name in ("top_p", "repetition_penalty")}
    lists = {
        "stop_token_ids": tuple(params.stop_token_ids),
        "logit_bias": dict(params.logit_bias),
        "bad_words": tuple(_compact(word) for word in params.bad_words),
    }
    return SamplingParams(**{**values, **unset_is_1, **lists, "pooling": Pooling(params.pooling)})


def _compact(packed: bytes) -> array[int]:
    """Packed token ids in 4 bytes each: a list takes nine times as much, and every prompt of a request has its own."""
    ids = array("I")
    ids.frombytes(packed)
    return ids


def request_from_wire(
    request_id: str, spec: common_pb2.GenerateSpec, *, prefill_only: bool = False
) -> EngineRequest:
    """The engine's request for an attempt, with its engine id. A prefill-only request exports its KV."""
    return EngineRequest(
        request_id=request_id,
        prompt_tokens=unpack_tokens(spec.prompt_tokens),
        output_tokens=unpack_tokens(spec.output_tokens),
        sampling=sampling_from_wire(spec.sampling),
        grammar=grammar_from_wire(spec.grammar) if spec.HasField("grammar") else None,
        first_choice=spec.first_choice,
        n=max(1, spec.n),
        salt=spec.salt,
        adapter=spec.adapter,
        priority=spec.priority,
        tenant=spec.tenant,
        weight=spec.weight if spec.weight > 0 else 1.0,
        prefill_only=prefill_only,
        export=prefill_only,
    )


def token_to_wire(token: TokenOutput) -> common_pb2.Token:
    return common_pb2.Token(
        choice=token.choice,
        position=token.position,
        token_id=token.token_id,
        logprob=token.logprob,
        top_logprobs=[
            common_pb2.TokenLogprob(token_id=token_id, logprob=logprob)
            for token_id, logprob in token.top_logprobs
        ],
        finish=_FINISH_TO_WIRE[token.finish],
    )


def add_to_log(log: AttemptLog, token: TokenOutput, *, whole: bool) -> None:
    """`whole`: the request wants log probabilities. Raises ValueError unless it is its choice's next token."""
    extra = token_to_wire(token) if whole or token.finish is not None else None
    log.add(token.choice, token.position, token.token_id, extra)


def tokens_from_wire(request_id: str, tokens: Iterable[common_pb2.Token]) -> list[TokenOutput]:
    return [
        TokenOutput(
            request_id=request_id,
            choice=token.choice,
            position=token.position,
            token_id=token.token_id,
            logprob=token.logprob,
            top_logprobs=tuple((top.token_id, top.logprob) for top in token.top_logprobs),
            finish=_FINISH_FROM_WIRE[token.finish],
        )
        for token in tokens
    ]
