"""Every bound of a request: the bound itself is accepted, one beyond it is refused by name. Lengths are checked before
anything iterates over a client's data."""

from __future__ import annotations

import dataclasses
import math
import secrets
from collections.abc import Sequence
from typing import Any

import pytest

from cluster.errors import (
    BatonError,
    ContextLengthError,
    InvalidRequestError,
    ModelError,
    UnknownModelError,
)
from router.request.completion import Completion
from router.request.fields import read
from router.request.options import MAX_PRIORITY, GenerationOptions
from router.request.validator import MAX_REQUEST_ID, Envelope, Validator
from tests.router.request.validators import CONTEXT, VOCAB, Long, validator

ENVELOPE = {field.name for field in dataclasses.fields(Envelope)}


def completed(prompt: Sequence[int], by: Validator | None = None, **fields: Any) -> Completion:
    """The completion that a request with these fields becomes."""
    by = by or validator()
    by.limits.check_model(fields.pop("model", ""))
    options = read(GenerationOptions, {key: fields[key] for key in fields if key not in ENVELOPE}, by.limits)
    return by.completion(prompt, options, Envelope(**{key: fields[key] for key in fields if key in ENVELOPE}))


# field, the last accepted value, the first refused one
BOUNDS: list[tuple[str, Any, Any]] = [
    ("temperature", 0.0, -1e-9),
    ("temperature", 100.0, 100.1),
    ("top_k", 2**32 - 1, 2**32),
    ("top_k", -(2**31), -(2**31) - 1),
    ("top_p", 1.0, 1.0001),
    ("top_p", 1e-9, 0.0),
    ("min_p", 0.0, -1e-9),
    ("min_p", 1.0, 1.0001),
    ("repetition_penalty", 1e-9, 0.0),
    ("repetition_penalty", 100.0, 100.1),
    ("presence_penalty", -2.0, -2.1),
    ("presence_penalty", 2.0, 2.1),
    ("frequency_penalty", -2.0, -2.1),
    ("frequency_penalty", 2.0, 2.1),
    ("seed", 2**64 - 1, 2**64),
    ("seed", -(2**63), -(2**63) - 1),
    ("n", 1, 0),
    ("n", 3, 4),
    ("max_tokens", 1, 0),
    ("max_tokens", CONTEXT - 4, CONTEXT - 3),
    ("min_tokens", 0, -1),
    ("min_tokens", CONTEXT - 4, CONTEXT - 3),
    ("logprobs", 0, -1),
    ("logprobs", 5, 6),
    ("priority", MAX_PRIORITY, MAX_PRIORITY + 1),
    ("priority", -MAX_PRIORITY, -MAX_PRIORITY - 1),
    ("stop", ("a", "b"), ("a", "b", "c")),
    ("stop", ("x" * 10,), ("x" * 11,)),
    ("stop", ("x",), ("",)),
    ("stop_token_ids", (1, 2, 3, 4), (1, 2, 3, 4, 5)),
    ("stop_token_ids", (VOCAB - 1,), (VOCAB,)),
    ("stop_token_ids", (0,), (-1,)),
    ("logit_bias", {1: 0.0, 2: 0.0, 3: 0.0}, {1: 0.0, 2: 0.0, 3: 0.0, 4: 0.0}),
    ("logit_bias", {VOCAB - 1: 1.0}, {VOCAB: 1.0}),
    ("logit_bias", {1: 100.0}, {1: 100.1}),
    ("logit_bias", {1: -100.0}, {1: -100.1}),
    ("request_id", "r" * MAX_REQUEST_ID, "r" * (MAX_REQUEST_ID + 1)),
    ("request_id", "r", "r\n"),
    ("model", "m", "n"),
]
PROMPT = [1, 2, 3, 4]


@pytest.mark.parametrize(("name", "within", "beyond"), BOUNDS)
def test_the_last_value_is_taken_and_the_next_one_refused(name, within, beyond):
    taken = completed(PROMPT, **{name: within})
    assert taken.prompt_tokens == PROMPT
    with pytest.raises(InvalidRequestError) as caught:
        completed(PROMPT, **{name: beyond})
    assert caught.value.field == name
    assert not caught.value.retryable


def test_accepted_values_are_passed_on_unchanged():
    asked: dict[str, Any] = {
        "temperature": 0.5,
        "top_k": 7,
        "top_p": 0.25,
        "min_p": 0.125,
        "seed": -1,
        "max_tokens": 9,
        "min_tokens": 2,
        "n": 2,
    }
    made = completed(PROMPT, **asked)
    sampling = made.sampling
    assert (sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p) == (0.5, 7, 0.25, 0.125)
    assert (sampling.seed, sampling.max_tokens, sampling.min_tokens, made.n) == (2**64 - 1, 9, 2, 2)
    assert not sampling.logprobs
    assert completed(PROMPT, logprobs=0).sampling.logprobs


@pytest.mark.parametrize(
    ("asked", "sent"),
    [
        (-(2**31), 0),
        (-1, 0),
        (0, 0),
        (1, 1),
        (VOCAB - 1, VOCAB - 1),
        (VOCAB, 0),
        (VOCAB + 1, 0),
        (2**32 - 1, 0),
    ],
)
def test_a_top_k_that_leaves_out_no_token_is_as_none(asked, sent):
    """Above the vocabulary it was refused; vLLM takes it, and models have it in generation_config.json."""
    assert completed(PROMPT, top_k=asked).sampling.top_k == sent
    assert completed(PROMPT, validator({"top_k": asked})).sampling.top_k == sent


@pytest.mark.parametrize("name", ["top_p", "repetition_penalty"])
@pytest.mark.parametrize("value", [5e-324, 1e-300, 1e-46, 1e-45, 1e-38])
def test_a_value_above_0_is_not_0_on_the_wire(name, value):
    """The wire's floats are shorter than a client's, and 0 there is a field that was not set: no top_p at all."""
    sent = completed(PROMPT, **{name: value}).sampling
    received = type(sent).FromString(sent.SerializeToString())
    assert 0.0 < getattr(received, name) < 1e-37


def test_without_max_tokens_the_rest_of_the_context_is_there():
    assert completed(PROMPT).sampling.max_tokens == CONTEXT - 4
    assert completed(PROMPT, validator(max_model_len=10)).sampling.max_tokens == 6
    assert validator(max_model_len=CONTEXT + 1).limits.max_model_len == CONTEXT, (
        "no longer than the model's own"
    )


@pytest.mark.parametrize("value", [math.nan, math.inf, True, "1"])
def test_a_value_that_is_not_a_number_is_refused(value):
    for name in ("temperature", "n", "max_tokens"):
        with pytest.raises(InvalidRequestError) as caught:
            completed(PROMPT, **{name: value})
        assert caught.value.field == name


@pytest.mark.parametrize(("asked", "left"), [(60.0, 60.0), (61.0, 60.0), (1.0, 1.0), (None, 60.0)])
def test_a_deadline_is_at_most_the_router_s(asked, left):
    assert completed(PROMPT, deadline_seconds=asked).deadline_seconds == left


def test_an_unknown_model_is_named():
    with pytest.raises(UnknownModelError):
        completed(PROMPT, model="other")


def test_defaults_that_are_wrong_are_the_model_s_fault():
    with pytest.raises(ModelError):
        validator({"temperature": -1.0})


# --- lengths -----------------------------------------------------------------------------------------------------------


def refused(prompt: Sequence[int], **fields: Any) -> BatonError:
    with pytest.raises(BatonError) as caught:
        completed(prompt, **fields)
    assert not caught.value.retryable, "asking again is no help"
    return caught.value


def test_a_prompt_leaves_room_for_a_token():
    assert completed([1] * (CONTEXT - 1)).sampling.max_tokens == 1
    error = refused([1] * CONTEXT)
    assert isinstance(error, ContextLengthError) and error.field == "prompt"
    assert refused([]).field == "prompt"
    assert refused([VOCAB]).field == "prompt"
    assert completed([0, VOCAB - 1]).prompt_tokens == [0, VOCAB - 1]


def test_prompt_and_held_tokens_leave_room_for_a_token():
    held = CONTEXT - 4 - 1
    assert len(completed(PROMPT, resume_tokens=[1] * held).resume_tokens) == held
    error = refused(PROMPT, resume_tokens=[1] * (held + 1))
    assert isinstance(error, ContextLengthError) and error.field == "resume_tokens"


def test_held_tokens_are_fewer_than_were_asked_for():
    assert completed(PROMPT, resume_tokens=[1] * 7, max_tokens=8).resume_tokens
    assert refused(PROMPT, resume_tokens=[1] * 8, max_tokens=8).field == "resume_tokens"
    assert completed(PROMPT, resume_tokens=[VOCAB - 1]).resume_tokens
    assert refused(PROMPT, resume_tokens=[VOCAB]).field == "resume_tokens"


def test_a_resumed_request_has_one_choice():
    assert completed(PROMPT, resume_tokens=[1], n=1).n == 1
    assert refused(PROMPT, resume_tokens=[1], n=2).field == "resume_tokens"


@pytest.mark.parametrize("length", [CONTEXT, 500_000, 2**40])
def test_elements_of_a_too_long_prompt_are_not_read(length):
    assert refused(Long(length)).field == "prompt"
    assert refused(PROMPT, resume_tokens=Long(length)).field == "resume_tokens"


def test_elements_of_a_too_long_list_are_not_read():
    assert refused(PROMPT, stop_token_ids=Long(500_000)).field == "stop_token_ids"


def test_requests_get_names_of_their_own():
    names = {completed(PROMPT).request_id for _ in range(3)}
    assert len(names) == 3
    own = secrets.token_hex(4)
    assert completed(PROMPT, request_id=own).request_id == own


@pytest.mark.parametrize(
    ("asked", "entries"),
    [
        ({"max_tokens": 10}, 10),
        ({"max_tokens": 10, "n": 3}, 30),
        ({"max_tokens": 10, "n": 3, "prompts": 2}, 60),
        ({"max_tokens": 10, "logprobs": 0}, 10),
        ({"max_tokens": 10, "logprobs": 5, "n": 3, "prompts": 2}, 360),
    ],
)
def test_an_answer_has_as_many_entries_as_it_may(asked: dict[str, Any], entries: int) -> None:
    assert completed([1], validator(max_answer_entries=entries), **asked).sampling.max_tokens == 10
    with pytest.raises(InvalidRequestError) as caught:
        completed([1], validator(max_answer_entries=entries - 1), **asked)
    assert (caught.value.field, caught.value.limit) == ("max_tokens", str(entries - 1))
    del asked["max_tokens"]
    assert completed([1], validator(max_answer_entries=entries - 1), **asked).sampling.max_tokens == 9


def test_without_max_tokens_an_answer_that_may_have_no_token_is_refused() -> None:
    with pytest.raises(InvalidRequestError) as caught:
        completed([1], validator(max_answer_entries=17), n=3, logprobs=5)
    assert (caught.value.field, caught.value.limit) == ("max_tokens", "17")
