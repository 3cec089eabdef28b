"""A run ends early where each of its keys is refused everywhere, and only there."""

from __future__ import annotations

import itertools

import pytest

from loadgen.config import LoadConfig
from loadgen.key_watch import REFUSALS, KeyRefused, KeyWatch
from loadgen.load import run_all
from loadgen.record import Failure
from tests.loadgen.stub_http import StubHttp

REFUSED = Failure("http_401", "no")
A, B, C = ("a", "key"), ("b", "key"), ("a", "other key")


def test_refusals_of_one_key_do_not_end_what_another_key_may_do() -> None:
    """Several configurations run together, each with a key of its own, at the same server."""
    watch = KeyWatch([("a", "revoked"), ("a", "valid")])
    for _ in range(REFUSALS + 1):
        watch.note(("a", "revoked"), REFUSED)
    watch.note(("a", "valid"), None)
    watch.check()


def test_refusals_of_a_key_are_counted_beside_other_ends() -> None:
    """Of one of two servers, and of a key that is revoked meanwhile."""
    one_of_two, revoked, both = KeyWatch([A, B]), KeyWatch([A]), KeyWatch([A, B])
    one_of_two.note(A, REFUSED)
    one_of_two.note(B, Failure("http_429"))
    one_of_two.note(B, REFUSED)
    revoked.note(A, None)
    revoked.note(A, REFUSED)
    revoked.check()
    for use in [A, B] * (REFUSALS - 1) + [A]:
        both.note(use, REFUSED)
    with pytest.raises(KeyRefused, match="no"):
        both.check()  # a run that ends now
    with pytest.raises(KeyRefused, match="no"):
        both.note(B, REFUSED)
    both.note(A, None)  # a request that was in flight
    with pytest.raises(KeyRefused, match="no"):
        both.check()


@pytest.mark.parametrize("order", list(itertools.permutations([A, B, C])))
def test_a_run_ends_with_the_last_refusal_that_each_of_several_keys_needs(
    order: tuple[tuple[str, str], ...],
) -> None:
    watch = KeyWatch([A, B, C])
    *others, last = order
    for use in others:
        for _ in range(2 * REFUSALS):
            watch.note(use, REFUSED)
    for _ in range(REFUSALS - 1):
        watch.note(last, REFUSED)
    with pytest.raises(KeyRefused, match="the last one"):
        watch.note(last, Failure("grpc_unauthenticated", "the last one"))


@pytest.mark.parametrize("good", [A, B, C])
@pytest.mark.parametrize("end", [None, Failure("http_429"), Failure("connection")])
@pytest.mark.parametrize("before", [0, 1, REFUSALS - 1])
def test_any_other_end_with_one_of_several_keys_lets_the_run_go_on(
    before: int, end: Failure | None, good: tuple[str, str]
) -> None:
    """Even where all of them are refused afterwards, as often as it takes: the run's figures count these."""
    watch = KeyWatch([A, B, C])
    for use in [A, B, C] * before:
        watch.note(use, REFUSED)
    watch.note(good, end)
    for use in [A, B, C] * (2 * REFUSALS):
        watch.note(use, REFUSED)
    watch.check()


def test_a_run_that_is_over_is_refused_though_one_of_its_keys_was_not_used() -> None:
    watch = KeyWatch([A, C])
    watch.check()
    for _ in range(2 * REFUSALS):
        watch.note(A, REFUSED)
    with pytest.raises(KeyRefused):
        watch.check()


async def test_a_load_with_two_keys_goes_on_for_the_one_that_is_valid() -> None:
    async with StubHttp(valid_key="good") as server:
        good, bad = (
            LoadConfig(
                protocol="http",
                targets=(server.url,),
                concurrency=1,
                requests=requests,
                api_key=key,
                max_tokens=4,
            )
            for key, requests in (("good", 1), ("bad", 3 * REFUSALS))
        )
        report = await run_all([good, bad])
        assert (report.requests, report.errors) == (1 + 3 * REFUSALS, {"http_401": 3 * REFUSALS})
        with pytest.raises(KeyRefused):
            await run_all([bad, bad.model_copy(update={"api_key": "worse"})])
        assert server.refused - 3 * REFUSALS < 2 * 3 * REFUSALS, "it has ended early"
