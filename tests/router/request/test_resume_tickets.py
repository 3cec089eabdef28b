"""Resume tickets prove that a request was admitted."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cluster.errors import InvalidRequestError
from router.request.completion import Completion
from router.request.no_parallel_calls import FirstCall
from router.request.resume_tickets import GRACE_SECONDS, Tickets, name_of
from router.text.parsers.registry import format_of
from wire import common_pb2

NOW = 1_800_000_000.0
SEED = 7
NAME = name_of("acme", "req-1", b"abcd")


def completion(ticket: bytes, **more: object) -> Completion:
    made = Completion(
        "req-1", "m", [1], common_pb2.SamplingParams(seed=SEED), resume_tokens=[5], resume_ticket=ticket
    )
    return replace(made, **more)  # type: ignore[arg-type]


def tickets(secret: str = "s", now: float = NOW) -> Tickets:
    return Tickets(secret, 600.0, lambda: now)


def test_any_router_of_the_deployment_accepts_it():
    ticket = tickets().issue(completion(b""), NAME)
    assert tickets(now=NOW + 300).check(completion(ticket), NAME)
    assert tickets(now=NOW - 30).check(completion(ticket), NAME), "clocks differ a little"


@pytest.mark.parametrize(
    "name", [("other", "req-1", b"abcd"), ("acme", "req-2", b"abcd"), ("acme", "req-1", b"abce")]
)
def test_it_is_for_one_tenant_request_and_prompt(name):
    ticket = tickets().issue(completion(b""), NAME)
    with pytest.raises(InvalidRequestError):
        tickets().check(completion(ticket), name_of(*name))
    assert not tickets().check(completion(ticket, resume_tokens=[]), name_of(*name))


def refused(made: Completion, by: Tickets) -> bool:
    """With tokens the request is refused, without them it counts as a new one."""
    with pytest.raises(InvalidRequestError) as caught:
        by.check(made, NAME)
    assert caught.value.field == "resume_ticket"
    return not by.check(replace(made, resume_tokens=[]), NAME)


def test_it_is_for_one_model() -> None:
    given = ("acme", "req-1", b"abcd")
    names = {name_of(*given, model) for model in ("", "second", "third")}
    assert len(names) == 3 and name_of(*given) == NAME


def test_nothing_else_opens():
    ticket = tickets().issue(completion(b""), NAME)
    flipped = bytes([ticket[0] ^ 1]) + ticket[1:]
    for wrong in (b"", b"x", flipped, ticket[:-1], ticket + b"x", ticket[:-1] + bytes([ticket[-1] ^ 1])):
        assert refused(completion(wrong), tickets())
    assert refused(completion(ticket), tickets("another"))
    assert refused(completion(ticket, sampling=common_pb2.SamplingParams(seed=8)), tickets())


@pytest.mark.parametrize(
    "more", [{"max_tokens": 300}, {"min_tokens": 3}, {"ignore_eos": True}, {"top_logprobs": 20}]
)
def test_it_is_for_as_much_as_was_admitted(more):
    ticket = tickets().issue(completion(b""), NAME)
    assert refused(completion(ticket, sampling=common_pb2.SamplingParams(seed=SEED, **more)), tickets())
    assert refused(completion(ticket, n=4), tickets())


def test_it_is_for_one_grammar() -> None:
    """What a grammar allows decides how long an answer may become."""
    grammar = common_pb2.Grammar(regex="[a-z]")
    ticket = tickets().issue(completion(b"", grammar=grammar), NAME)
    assert tickets().check(completion(ticket, grammar=grammar), NAME)
    for other in (None, common_pb2.Grammar(regex="[a-z]*")):
        assert refused(completion(ticket, grammar=other), tickets())


def test_a_ticket_alone_is_that_of_a_request_that_was_charged():
    assert tickets().check(completion(tickets().issue(completion(b""), NAME), resume_tokens=[]), NAME)


def test_it_ends_with_the_longest_request():
    ticket = tickets().issue(completion(b""), NAME)
    assert tickets(now=NOW + 600 + GRACE_SECONDS).check(completion(ticket), NAME)
    assert refused(completion(ticket), tickets(now=NOW + 601 + GRACE_SECONDS))


def test_names_do_not_run_into_each_other():
    assert name_of("ab", "c", b"") != name_of("a", "bc", b"") != name_of("a", "b", b"c")


def test_it_is_for_one_way_of_parsing():
    """A router with another parser would show the rest of the answer as parts that do not follow the client's."""
    parsed = format_of("hermes", "think", opened=False, special={})
    ticket = tickets().issue(completion(b"", answer_format=parsed), NAME)
    same = format_of("hermes", "think", opened=False, special={})
    assert tickets().check(completion(ticket, answer_format=same), NAME)
    others = [
        format_of("pythonic", "think", opened=False, special={}),
        format_of("hermes", "", opened=False, special={}),
        format_of("hermes", "think", opened=True, special={}),
        format_of("hermes", "think", opened=False, special={}, names=["f"]),
        FirstCall(parsed),
        None,
    ]
    for other in others:
        assert refused(completion(ticket, answer_format=other), tickets())
    with pytest.raises(InvalidRequestError, match="tool_parser") as caught:
        tickets().check(completion(ticket), NAME)
    assert caught.value.field == "resume_ticket"
