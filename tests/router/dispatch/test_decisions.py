"""What follows a failed attempt: which worker is asked as arbiter, and which one is excluded from the next placement."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from cluster.errors import (
    AdapterMissingError,
    BatonError,
    BlocksExhaustedError,
    DrainingError,
    HandoffError,
    InvalidRequestError,
    OverloadedError,
    PeerLostError,
    TransportError,
)
from router.dispatch import dispatcher
from router.dispatch.attempt_events import Ended, Source
from router.dispatch.exclusions import ended_by
from router.dispatch.unreachable_pairs import UnreachablePairs
from router.placement.types import Reason
from router.text.tokenizer import ModelText
from tests.router.dispatch.scripted_attempts import NEW, PROMPT, Scripted, World, deliver, end, token

P, D = Source.PREFILL, Source.DECODE
Play = Callable[[Scripted], None]


class Played(World):
    """The first attempt is scripted; every other one succeeds."""

    def __init__(self, text: ModelText, play: Play, arbiter: str = "aborted"):
        super().__init__(text, [([], arbiter)])
        self.play = play
        self.services.pairs = UnreachablePairs(lambda: 0.0)
        self.asked = 0

    def attempt(self, **facts: Any) -> Scripted:
        made = super().attempt(**facts)
        if len(self.attempts) == 1:
            ask = made.abort_unless_committed

            async def abort_unless_committed() -> bool:
                self.asked += 1
                return await ask()

            made.abort_unless_committed = abort_unless_committed  # type: ignore[method-assign]
            made.start = lambda: self.play(made)  # type: ignore[method-assign]
        return made


async def run(world: Played, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatcher, "Attempt", world.attempt)
    async with asyncio.timeout(60):
        tokens = await deliver(world)
    assert [one.position for one in tokens] == list(range(PROMPT, PROMPT + NEW))


def lost(source: Source) -> Play:
    def play(attempt: Scripted) -> None:
        attempt.failed.add(source)
        attempt.events.add(Ended(source, None, PeerLostError("gone")))

    return play


def says(source: Source, outcome: str, error: BatonError | None = None) -> Play:
    return lambda attempt: attempt.ends(source, end(outcome, error))


def lost_after(tokens: int) -> Play:
    """P is lost; D has committed and continues to the end."""

    def play(attempt: Scripted) -> None:
        position = attempt.from_position
        for _ in range(tokens):
            position = attempt.play("next", position)
        lost(P)(attempt)
        asyncio.get_running_loop().call_later(0.01, rest, attempt, position)

    def rest(attempt: Scripted, position: int) -> None:
        while position < PROMPT + NEW:
            position = attempt.play("next", position)
        attempt.ends(D, end("DONE"))

    return play


@pytest.mark.parametrize("tokens", [0, 1, 5])
async def test_a_committed_attempt_goes_on_without_its_prefill_worker(text, monkeypatch, tokens):
    """Nothing is computed a second time."""
    world = Played(text, lost_after(tokens), "committed")
    await run(world, monkeypatch)
    assert world.asked == 1
    assert len(world.attempts) == 1, "a committed attempt was given up"


async def test_an_aborted_attempt_is_retried_without_the_lost_prefill_worker(text, monkeypatch):
    world = Played(text, lost(P))
    await run(world, monkeypatch)
    assert (world.asked, len(world.attempts)) == (1, 2)
    assert world.excluded[1] == {"p"}


async def test_a_decode_worker_that_does_not_answer_is_excluded(text, monkeypatch):
    """The prefill worker is not: its failure may have been caused by D."""
    world = Played(text, lost(P), "silent")
    await run(world, monkeypatch)
    assert world.excluded[1] == {"d"}


async def test_an_answer_that_is_whole_is_not_tried_again(text, monkeypatch):
    """The rest of its tokens comes while the decode worker, which does not answer, is asked for the attempt."""
    world = Played(text, lost(P))

    async def whole_meanwhile(attempt: Scripted) -> bool:
        for position in range(PROMPT, PROMPT + NEW):
            attempt.play("next", position)
        raise PeerLostError("no answer")

    monkeypatch.setattr(Scripted, "abort_unless_committed", whole_meanwhile)
    await run(world, monkeypatch)
    assert len(world.attempts) == 1 and world.attempts[0].closed


async def test_a_lost_decode_worker_is_excluded_without_asking_the_arbiter(text, monkeypatch):
    world = Played(text, lost(D))
    await run(world, monkeypatch)
    assert world.asked == 0
    assert world.excluded[1] == {"d"}


# source, outcome, error, workers excluded from the next placement
ENDS: list[tuple[Source, str, BatonError | None, set[str]]] = [
    (P, "REFUSED", BlocksExhaustedError("full", retry_after_seconds=0.001), {"d"}),
    (P, "REFUSED", DrainingError("leaves", retry_after_seconds=0.001), {"d"}),
    (P, "REFUSED", AdapterMissingError("at d"), {"d"}),
    (P, "ABORTED", AdapterMissingError("at p"), {"p"}),
    (D, "ABORTED", AdapterMissingError("at d"), {"d"}),
    (P, "ABORTED", DrainingError("p leaves"), {"p"}),
    (P, "ABORTED", TransportError("could not write"), {"d"}),
    # Aborted without a reason: treated as a pair that cannot reach each other.
    (P, "ABORTED", None, {"p", "d"}),
    (P, "ABORTED", PeerLostError("d is gone"), {"p", "d"}),
    (D, "ABORTED", DrainingError("d leaves"), {"d"}),
    (D, "ABORTED", HandoffError("x"), set()),
    (D, "ABORTED", BlocksExhaustedError("were needed", retry_after_seconds=0.001), {"d"}),
    (D, "PREEMPTED", None, set()),
    (D, "PREEMPTED", DrainingError("d leaves"), {"d"}),
    (D, "DONE", None, {"d"}),  # too early
]


@pytest.mark.parametrize(("source", "outcome", "error", "left_out"), ENDS)
async def test_workers_excluded_from_the_next_placement(text, monkeypatch, source, outcome, error, left_out):
    world = Played(text, says(source, outcome, error))
    await run(world, monkeypatch)
    assert len(world.attempts) == 2
    assert world.excluded[1] == left_out


async def test_workers_that_leave_a_gap_are_excluded(text, monkeypatch):
    """With the request's prefix in its cache, a faulty one would be chosen for each further attempt."""

    def gap(attempt: Scripted) -> None:
        attempt.play("gap", attempt.from_position)

    world = Played(text, gap)
    await run(world, monkeypatch)
    assert len(world.attempts) == 2 and world.excluded[1] == {"d"}


async def test_a_wrong_request_is_not_tried_again(text, monkeypatch):
    world = Played(text, says(D, "ABORTED", InvalidRequestError("no", field="n")))
    with pytest.raises(InvalidRequestError):
        await run(world, monkeypatch)
    assert len(world.attempts) == 1


async def test_the_end_of_a_prefill_alone_changes_nothing(text, monkeypatch):
    def play(attempt: Scripted) -> None:
        attempt.ends(P, end("DONE"))
        position = attempt.from_position
        while position < PROMPT + NEW:
            position = attempt.play("next", position)
        attempt.ends(D, end("DONE"))

    world = Played(text, play)
    await run(world, monkeypatch)
    assert (world.asked, len(world.attempts)) == (0, 1)


def test_the_script_s_last_token_ends_an_answer():
    assert token(PROMPT + NEW - 1).finish and not token(PROMPT).finish


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (PeerLostError("gone"), Reason.LOST),
        (DrainingError("leaving"), Reason.DRAINED),
        (OverloadedError("full"), Reason.REFUSED),
    ],
)
def test_a_worker_is_excluded_for_what_it_said(error: BatonError, reason: Reason) -> None:
    """One that refused the call, as it drained or was full, was shown as one whose stream was lost."""
    assert ended_by(Ended(P, None, error)) is reason
