"""Extreme but valid values through real engines, aggregated and handed over. An answer ends with its tokens or with the
typed error of that one request; no worker and no engine ends."""

from __future__ import annotations

import secrets
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from cluster.protocol.block_hash import pack_tokens
from engine.request import MAX_PENALTY
from tests.engine.sampling.grammar.grammars import bitmap
from tests.fuzz.conftest import few
from tests.fuzz.tally import ANSWERED, REFUSED, Tally
from tests.fuzz.worker_messages import message
from tests.harness.checkpoints import VOCAB
from wire import common_pb2
from worker.validate import MAX_LOGIT_BIAS, MAX_TOKENS

VOCABULARY = VOCAB
SMALLEST, TINY, HUGE = (
    float(np.float32(value)) for value in (1e-45, np.finfo(np.float32).tiny, np.finfo(np.float32).max)
)
DONE = common_pb2.ATTEMPT_OUTCOME_DONE
OF_ONE_REQUEST = ("EngineRequestError", "DeadEndError")  # its logits had no finite maximum, for example


def _edges(low: float, high: float) -> st.SearchStrategy[float]:
    """The ends of a range, their neighbours, and values between them by orders of magnitude."""
    candidates = [low, high, 0.0, 1.0, SMALLEST, TINY, 1e-30, 1e-10, 1e-7, 1e-5, 9.9e-6, 1e-2, 9.9e-3, 0.5]
    candidates += [1.0 - 2**-24, 1.0 + 2**-23, 1e2, 1e6, -1.0, -1e-30, -1e6, HUGE]
    return st.sampled_from(sorted({float(np.float32(c)) for c in candidates if low <= c <= high}))


def _penalties() -> st.SearchStrategy[float]:
    return _edges(-MAX_PENALTY, MAX_PENALTY)


token_ids = st.integers(0, VOCABULARY - 1)
fields: dict[str, st.SearchStrategy[Any]] = {
    "temperature": _edges(0.0, 1e6),
    "top_k": st.sampled_from([0, 1, 2, VOCABULARY - 1, VOCABULARY, 2**31 - 1, 2**32 - 1]),
    "top_p": _edges(0.0, 1.0),
    "min_p": _edges(0.0, 1.0),
    "repetition_penalty": _edges(0.0, MAX_PENALTY),
    "presence_penalty": _penalties(),
    "frequency_penalty": _penalties(),
    "seed": st.sampled_from([0, 1, 2**32 - 1, 2**32, 2**63, 2**64 - 1]),
    "max_tokens": st.sampled_from([1, 2, 4, MAX_TOKENS]),
    "min_tokens": st.sampled_from([0, 1, 4, 2**32 - 1]),
    "ignore_eos": st.booleans(),
    "logprobs": st.booleans(),
    "top_logprobs": st.sampled_from([0, 1, VOCABULARY]),
    "stop_token_ids": st.lists(token_ids, max_size=3) | st.just(list(range(VOCABULARY))),
    "logit_bias": st.one_of(
        st.dictionaries(token_ids, _edges(-MAX_LOGIT_BIAS, MAX_LOGIT_BIAS), max_size=4),
        _edges(-MAX_LOGIT_BIAS, MAX_LOGIT_BIAS).map(lambda bias: dict.fromkeys(range(VOCABULARY), bias)),
    ),
    "allowed_tokens": st.one_of(
        st.lists(token_ids, min_size=1, max_size=3).map(bitmap),
        st.just(bitmap(list(range(VOCABULARY)))),
    ),
    "bad_words": st.one_of(
        st.lists(st.lists(token_ids, min_size=1, max_size=4).map(pack_tokens), max_size=4),
        st.just([pack_tokens([token]) for token in range(VOCABULARY)]),
        st.just([pack_tokens([token] * 2) for token in range(VOCABULARY)]),
    ),
}


@st.composite
def samplings(draw: st.DrawFn) -> common_pb2.SamplingParams:
    names = draw(st.lists(st.sampled_from(sorted(fields)), min_size=1, max_size=6, unique=True))
    made = common_pb2.SamplingParams(max_tokens=3, temperature=1.0, seed=1)
    for name in names:
        value = draw(fields[name])
        if name == "stop_token_ids":
            made.stop_token_ids.extend(value)
        elif name == "bad_words":
            made.bad_words.extend(value)
        elif name == "logit_bias":
            made.logit_bias.update(value)
        else:
            setattr(made, name, value)
    return made


@st.composite
def specs(draw: st.DrawFn) -> common_pb2.GenerateSpec:
    """With up to three choices, or resumed in the middle of its output."""
    prompt = draw(st.lists(token_ids, min_size=1, max_size=40))
    sampling = draw(samplings())
    # Large limits end at the context anyway; a few tokens show the same.
    sampling.max_tokens = min(sampling.max_tokens, 6)
    made = common_pb2.GenerateSpec(
        prompt_tokens=pack_tokens(prompt),
        sampling=sampling,
        salt=bytes(16),
        n=draw(st.sampled_from([1, 1, 2, 3])),
    )
    made.priority = draw(st.sampled_from([-(2**31), -1, 0, 1, 2**31 - 1]))
    made.weight = draw(_edges(0.0, 1e9))
    made.first_choice = draw(st.sampled_from([0, 1, 1000, MAX_TOKENS - 1]))
    if made.n == 1 and sampling.max_tokens > 1 and draw(st.booleans()):
        held = draw(st.lists(token_ids, min_size=1, max_size=sampling.max_tokens - 1))
        made.output_tokens = pack_tokens(held)
    return made


def judge(
    spec: common_pb2.GenerateSpec,
    tokens: list[common_pb2.Token],
    end: common_pb2.AttemptEnd,
    tally: Tally,
    kind: str,
) -> None:
    if end.outcome != DONE:
        assert end.error.code in OF_ONE_REQUEST, (spec, end)
        tally.count(kind, REFUSED)
        return
    assert all(token.token_id < VOCABULARY for token in tokens)
    finished = {token.choice for token in tokens if token.finish}
    assert finished == set(range(spec.first_choice, spec.first_choice + max(1, spec.n))), (spec, tokens)
    tally.count(kind, ANSWERED)


@few(250, 0.45)
@given(spec=specs())
def test_aggregated(spec, pair, channels, tally):
    asked = message(pair, "Decode/Run", secrets.token_bytes(16), [1])
    asked.spec.CopyFrom(spec)
    tokens, end = pair.answer(channels, "Decode/Run", asked)
    judge(spec, tokens, end, tally, "extreme values: aggregated")


@few(120, 0.2)
@given(spec=specs())
def test_handed_over(spec, pair, channels, tally):
    transfer_id = secrets.token_bytes(16)  # an id is used once, also where an example is tried again
    run = message(pair, "Prefill/Run", transfer_id, [1])
    run.spec.CopyFrom(spec)
    run.spec.model_id = pair.decode._identity.model_id
    run.admission_deadline_ms = 20_000
    decoding = pair.read(pair.decode, transfer_id, run.spec)
    run.decode_handle.CopyFrom(decoding.reference)
    first, end = pair.answer(channels, "Prefill/Run", run)
    finished = {token.choice for token in first if token.finish}
    if end.outcome != DONE or len(finished) == max(1, spec.n):  # nothing is left for D to send
        judge(spec, first, end, tally, "extreme values: handed over")
        return
    end = pair.client.end_of(decoding, 60.0)
    tokens = [token for tokens in decoding.tokens.values() for token in tokens]
    known = {(token.choice, token.position) for token in tokens}
    tokens += [token for token in first if (token.choice, token.position) not in known]
    judge(spec, tokens, end, tally, "extreme values: handed over")


def test_both_engines_still_compute(pair, channels):
    for method, transfer_id in (("Decode/Run", b"c" * 16), ("Prefill/Run", b"d" * 16)):
        _, end = pair.answer(channels, method, message(pair, method, transfer_id, [7] * 30))
        assert end.outcome == DONE, end
    pair.check_well()
