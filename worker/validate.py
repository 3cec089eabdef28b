"""Checks calls of routers, and the Reserve of a prefill worker. Routers check the requests of clients; this checks that a
message can be computed at all, because one message must not end a worker for all other requests."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from cluster.errors import ContextLengthError, UnsupportedFieldError
from cluster.grammar.spec import grammar_from_wire
from cluster.protocol.block_hash import HASH_BYTES
from cluster.protocol.first_token import ends_with_first_token
from cluster.protocol.names import ADAPTER_DIGEST, check_name, check_transfer_id, invalid
from cluster.protocol.wire_version import check_wire_version
from engine.request import SAMPLING_BOUNDS
from wire import common_pb2, decode_pb2, prefill_pb2

MAX_LOGIT_BIAS = 1e6
MAX_TOKENS = 2**31


@dataclass(frozen=True)
class SpecLimits:
    """Limits of one worker. `max_choices`: all choices of a request run at the same time. `max_model_len`: tokens of its
    context."""

    model_id: str
    vocab_size: int
    max_choices: int
    max_model_len: int
    generates: bool = True  # False: a base model without an output head


Call = prefill_pb2.PrefillRunRequest | decode_pb2.DecodeRunRequest


def check_call(call: Call, worker_id: str) -> None:
    """Check a router's call that opens an attempt. Raises a BatonError naming the field."""
    check_wire_version(call.wire_version, worker_id)
    check_transfer_id(call.transfer_id)
    check_name("request_id", call.request_id)


def admission_seconds(call: Call) -> float:
    """How long after its arrival the attempt may wait for a turn or a reservation."""
    return (call.admission_deadline_ms or 30_000) / 1000


def check_spec(spec: common_pb2.GenerateSpec, limits: SpecLimits) -> None:
    """Raises InvalidRequestError naming the field. Lists are counted before anything walks them."""
    check_name("model_id", spec.model_id)
    if spec.model_id and spec.model_id != limits.model_id:
        raise invalid("model_id", f"{spec.model_id!r} is not {limits.model_id!r}, which this worker serves")
    if not spec.prompt_tokens:
        raise invalid("prompt_tokens", "are missing")
    _check_length(spec, limits.max_model_len)
    _check_packed("prompt_tokens", spec.prompt_tokens, limits.vocab_size)
    _check_packed("output_tokens", spec.output_tokens, limits.vocab_size)
    if spec.n > limits.max_choices or spec.first_choice >= MAX_TOKENS:
        raise invalid("n", f"at most {limits.max_choices} choices")
    if spec.output_tokens and spec.n > 1:
        raise invalid("output_tokens", "a resumed request has one choice")
    if len(spec.salt) != HASH_BYTES:
        raise invalid("salt", f"{len(spec.salt)} bytes instead of {HASH_BYTES}")
    if spec.adapter and not ADAPTER_DIGEST.match(spec.adapter):
        raise invalid("adapter", "no digest of 32 hexadecimal digits")
    check_name("tenant", spec.tenant)
    _check_number("weight", spec.weight, 0.0, 1e9)
    _check_sampling(spec.sampling, limits.vocab_size)
    _check_allowed(spec.sampling.allowed_tokens, limits.vocab_size)
    _check_words(spec.sampling.bad_words, limits.vocab_size)
    _check_pooling(spec, limits)
    if spec.HasField("grammar"):
        grammar_from_wire(spec.grammar)
        if spec.sampling.stop_token_ids:
            raise invalid("stop_token_ids", "would end an answer where its grammar does not")


def _check_pooling(spec: common_pb2.GenerateSpec, limits: SpecLimits) -> None:
    sampling = spec.sampling
    if not sampling.pooling:
        if not limits.generates:
            what = f"model: {limits.model_id} is a base model, without an output head: it generates nothing"
            raise UnsupportedFieldError(what, field="model")
        return
    if sampling.pooling not in common_pb2.Pooling.values():
        raise invalid("pooling", f"{sampling.pooling} is unknown")
    if spec.n > 1 or spec.output_tokens or sampling.prompt_logprobs or not ends_with_first_token(spec):
        what = "needs n and max_tokens of at most 1, without output_tokens and prompt_logprobs"
        raise invalid("pooling", what)


def _check_length(spec: common_pb2.GenerateSpec, limit: int) -> None:
    length = (len(spec.prompt_tokens) + len(spec.output_tokens)) // 4
    if length > limit:
        what = f"{length} tokens do not fit a context of {limit}"
        raise ContextLengthError(what, field="prompt", limit=str(limit))


def _check_packed(field: str, packed: bytes, vocab_size: int) -> None:
    if len(packed) % 4:
        raise invalid(field, "not a list of uint32")
    if packed and int(np.frombuffer(packed, dtype="<u4").max()) >= vocab_size:
        raise invalid(field, f"token ids must lie in 0 … {vocab_size - 1}")


def _check_sampling(sampling: common_pb2.SamplingParams, vocab_size: int) -> None:
    """An unset message is all zeros; 0 means "off" where it has no other sense."""
    for name, (low, high) in SAMPLING_BOUNDS.items():
        _check_number(name, getattr(sampling, name), low, high)
    if not 1 <= sampling.max_tokens <= MAX_TOKENS:
        raise invalid("max_tokens", f"{sampling.max_tokens} is outside 1 … {MAX_TOKENS}")
    for name in ("top_logprobs", "prompt_top_logprobs"):
        if getattr(sampling, name) > vocab_size:
            raise invalid(name, f"at most {vocab_size}")
    for name in ("stop_token_ids", "logit_bias"):
        if len(getattr(sampling, name)) > vocab_size:
            raise invalid(name, f"more entries than the vocabulary has tokens: {vocab_size}")
    for token in sampling.stop_token_ids:
        if token >= vocab_size:
            raise invalid("stop_token_ids", f"token ids must lie in 0 … {vocab_size - 1}")
    for token, bias in sampling.logit_bias.items():
        if token >= vocab_size:
            raise invalid("logit_bias", f"token ids must lie in 0 … {vocab_size - 1}")
        _check_number("logit_bias", bias, -MAX_LOGIT_BIAS, MAX_LOGIT_BIAS)


def _check_allowed(bitmap: bytes, vocab_size: int) -> None:
    if len(bitmap) > (vocab_size + 7) // 8 or int.from_bytes(bitmap, "little") >> vocab_size:
        raise invalid("allowed_tokens", f"token ids must lie in 0 … {vocab_size - 1}")
    if bitmap and not any(bitmap):
        raise invalid("allowed_tokens", "at least one must be allowed")


def _check_words(words: Sequence[bytes], vocab_size: int) -> None:
    if len(words) > vocab_size:
        raise invalid("bad_words", f"more entries than the vocabulary has tokens: {vocab_size}")
    for word in words:
        if not word:
            raise invalid("bad_words", "each must have a token")
        _check_packed("bad_words", word, vocab_size)


def _check_number(field: str, value: float, low: float, high: float) -> None:
    if not math.isfinite(value) or not low <= value <= high:
        raise invalid(field, f"{value} is outside {low:g} … {high:g}")
