"""A request over attempts that fail in every way: whatever messages workers repeat, skip or leave out, the client gets
each position once and in order."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cluster.config.router import RouterConfig
from cluster.errors import BatonError, BlocksExhaustedError, PeerLostError, UnreadableAnswerError
from cluster.membership.topology import Location
from router.dispatch import dispatcher
from router.dispatch.attempt import Attempt
from router.dispatch.attempt_events import Broken, Complete, Ended, Source
from router.dispatch.batch_queue import BatchQueue
from router.dispatch.choice import ChoiceStream
from router.dispatch.services import Services
from router.dispatch.unreachable_pairs import UnreachablePairs
from router.link.links import Links
from router.link.token import Token
from router.placement.calibration import Calibrations
from router.placement.eligibility import Eligibility
from router.placement.types import KvGroup, Placed, PlacementRequest
from router.request.completion import Completion
from router.text.tokenizer import ModelText
from wire import common_pb2

PROMPT, NEW = 5, 12
P, D = Source.PREFILL, Source.DECODE

# What may happen in an attempt, before it goes well or is over.
STEPS = st.sampled_from(
    [
        "next",  # D's next token
        "next",
        "next",
        "first",  # P's first token, which D sends, too
        "again",  # D repeats an older one
        "gap",  # D leaves one out
        "prefill done",
        "prefill refused",
        "prefill aborted",
        "prefill lost",
        "decode lost",
        "decode preempted",
        "decode aborted",
        "decode done",  # too early
    ]
)
ARBITER = st.sampled_from(["committed", "aborted", "silent"])
SCRIPTS = st.lists(st.tuples(st.lists(STEPS, max_size=8), ARBITER), max_size=6)


def token(position: int) -> common_pb2.Token:
    """The one that every worker would give there."""
    last = position == PROMPT + NEW - 1
    finish = common_pb2.FINISH_REASON_LENGTH if last else common_pb2.FINISH_REASON_UNSPECIFIED
    return common_pb2.Token(position=position, token_id=10 + position % 40, finish=finish)


def end(outcome: str, error: BatonError | None = None) -> common_pb2.AttemptEnd:
    value = common_pb2.AttemptOutcome.Value(f"ATTEMPT_OUTCOME_{outcome}")
    return common_pb2.AttemptEnd(outcome=value, error=error.to_wire() if error is not None else None)


@dataclass(eq=False)
class Scripted:
    """Stands in for an Attempt: sends what its script says, then, if no worker is lost, the rest."""

    spec: common_pb2.GenerateSpec
    placed: Placed
    transfer_id: bytes
    choices: Sequence[ChoiceStream]
    take: Callable[[Token, Any], bool]
    steps: list[str]
    arbiter: str
    over: bool = False
    span: None = None
    prefilled_at: float = 0.0
    prefill_report: common_pb2.WorkReport | None = None
    started: float = field(default_factory=time.monotonic)
    trip_seconds: float = 0.0
    closed: bool = False
    finished: set[Source] = field(default_factory=set)
    failed: set[Source] = field(default_factory=set)
    responded: set[Source] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.events: BatchQueue[Any] = BatchQueue()
        self.from_position = self.choices[0].next_position

    def came(self, source: Source, token: Token) -> None:
        if not self.over:
            self.responded.add(source)
            self.take(token, self)

    def broken(self, error: BatonError) -> None:
        self.stop_reading()
        self.events.add(Broken(error))

    def complete(self) -> None:
        self.events.add(Complete())

    def stop_reading(self) -> None:
        self.over = True

    worker_of = Attempt.worker_of

    @property
    def is_local(self) -> bool:
        return False

    @property
    def has_ended(self) -> bool:
        return len(self.finished) == 2

    def start(self) -> None:
        self.playing = asyncio.get_running_loop().create_task(self.follow())

    async def follow(self) -> None:
        """An end is dealt with before the next step: tokens are taken at once, ends by the request's task."""
        position = self.from_position
        for step in self.steps:
            position = self.play(step, position)
            await asyncio.sleep(0.001 if step.startswith(("prefill", "decode")) else 0)
            if self.over:
                return
        while D not in self.finished | self.failed and position < PROMPT + NEW:
            position = self.play("next", position)
        for source in (P, D):
            if source not in self.finished | self.failed:
                self.ends(source, end("DONE"))

    def play(self, step: str, position: int) -> int:
        actor, _, what = step.partition(" ")
        source = P if actor in ("first", "prefill") else D
        if source in self.finished | self.failed:
            return position
        match step:
            case "next" | "gap":
                position += step == "gap"
                if position < PROMPT + NEW:
                    self.came(D, token(position))
                    position += 1
            case "first":
                if self.from_position < PROMPT + NEW:
                    self.came(P, token(self.from_position))
            case "again":
                if position > PROMPT:
                    self.came(D, token(max(PROMPT, position - 2)))
            case _ if what == "lost":
                self.failed.add(source)
                self.events.add(Ended(source, None, PeerLostError("gone")))
            case "prefill refused":
                self.ends(P, end("REFUSED", BlocksExhaustedError("full", retry_after_seconds=0.001)))
            case _:
                self.ends(source, end(what.upper(), PeerLostError("x") if what == "aborted" else None))
        return position

    def ends(self, source: Source, said: common_pb2.AttemptEnd) -> None:
        self.finished.add(source)
        self.events.add(Ended(source, said))

    async def abort_unless_committed(self) -> bool:
        if self.arbiter == "silent" or D in self.failed:
            raise PeerLostError("no answer")
        return self.arbiter == "committed"

    async def close(self) -> None:
        self.closed = True


class World:
    """Services of a router, whose attempts follow scripts; after the last script every attempt goes well."""

    def __init__(self, text: ModelText, scripts: list[tuple[list[str], str]]):
        self.scripts = list(scripts)
        self.attempts: list[Scripted] = []
        self.released: list[bytes] = []
        self.excluded: list[set[str]] = []
        self.calibrations = Calibrations()
        facts = {
            "place": "",
            "host": "here",
            "location": Location(),
            "model_id": "m",
            "page_size": 16,
            "layout": b"",
            "state": "ready",
            "lease": "live",
            "link_min_version": 1,
            "link_max_version": 1,
        }
        self.p, self.d = (
            SimpleNamespace(
                worker_id=name, address=name, epoch=1, name=name, role=role, served_model="", **facts
            )
            for name, role in (("p", "prefill"), ("d", "decode"))
        )
        members: Any = SimpleNamespace(all=[self.p, self.d])
        self.eligibility = Eligibility(members.all, "fallback")
        stand_in: Any = self
        config = RouterConfig(model=Path("/none"), max_attempts=50)
        self.services = Services(config, text, members, stand_in, stand_in, Links("r"), stand_in)
        self.services.new_transfer_id = lambda: len(self.attempts).to_bytes(16)  # type: ignore[method-assign]

    def kv_group(self, before: KvGroup | None, model: str = "") -> KvGroup:
        return KvGroup("m", 16, b"")

    async def charge(self, *_: Any) -> None:
        """No quota."""

    async def place(self, request: PlacementRequest) -> Placed:
        self.excluded.append(set(request.excluded))
        return Placed(self.p, self.d, 0, 0, False)  # type: ignore[arg-type]

    def prefilled(self, transfer_id: bytes) -> None:
        """Placement's accounts are its own tests' matter."""

    def release(self, transfer_id: bytes) -> None:
        self.released.append(transfer_id)

    def attempt(self, **facts: Any) -> Scripted:
        steps, arbiter = self.scripts.pop(0) if self.scripts else ([], "aborted")
        names = ("spec", "placed", "transfer_id", "choices", "take")
        made = Scripted(**{name: facts[name] for name in names}, steps=steps, arbiter=arbiter)
        self.attempts.append(made)
        return made


async def deliver(world: World) -> list[common_pb2.Token]:
    completion = Completion(
        "r", "m", list(range(3, 3 + PROMPT)), common_pb2.SamplingParams(max_tokens=NEW), deadline_seconds=60.0
    )
    deltas: BatchQueue[Any] = BatchQueue()
    before = len(world.attempts)
    running = dispatcher.RequestDispatcher(completion, world.services)
    running.start(deltas)
    tokens: list[common_pb2.Token] = []
    while batch := await deltas.take():
        for delta in batch:
            tokens += delta.tokens
    assert running.complete
    assert running.outcome.timings.attempts == len(world.attempts) - before
    await world.services.finish(5.0)
    return tokens


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(scripts=SCRIPTS)
def test_every_position_comes_once_and_in_order(text, scripts):
    with pytest.MonkeyPatch.context() as patch:
        world = World(text, scripts)
        patch.setattr(dispatcher, "Attempt", world.attempt)
        patch.setattr("router.dispatch.retry_policy.RETRY_PAUSE_SECONDS", 0.002)
        began = time.monotonic()
        tokens = asyncio.run(asyncio.wait_for(deliver(world), 30))
        assert time.monotonic() - began < 20
    assert [one.position for one in tokens] == list(range(PROMPT, PROMPT + NEW))
    assert [one.token_id for one in tokens] == [token(one.position).token_id for one in tokens]
    assert world.released == [attempt.transfer_id for attempt in world.attempts], "a charge that stays"
    assert all(attempt.closed or attempt.has_ended for attempt in world.attempts), (
        "a worker was not cancelled"
    )


async def test_workers_that_could_not_meet_are_kept_apart_until_they_meet(text, monkeypatch):
    world = World(text, 2 * [(["prefill aborted"], "aborted")])
    world.services.pairs = UnreachablePairs(lambda: 0.0)
    monkeypatch.setattr(dispatcher, "Attempt", world.attempt)
    await deliver(world)
    # Not d, by the request's own memory; not p, by the router's, as d is the only one. They come all the same, and meet.
    assert world.excluded == [set(), {"d", "p"}, {"d", "p"}]
    assert not world.services.pairs.any_unreachable
    await deliver(world)
    assert world.excluded[3:] == [set()]


async def test_an_answer_that_a_stop_string_ends_does_not_wait_for_its_workers(text, monkeypatch):
    """They do not look for stop strings: the decode worker goes on until its window is full, and then waits."""
    world = World(text, [])
    monkeypatch.setattr(dispatcher, "Attempt", world.attempt)
    monkeypatch.setattr(Scripted, "start", lambda made: made.came(D, token(PROMPT)))
    prompt = list(range(3, 3 + PROMPT))
    stop = text.detokenizer(prompt).add(token(PROMPT).token_id)
    assert stop, "it has a text"
    sampling = common_pb2.SamplingParams(max_tokens=NEW)
    completion = Completion("r", "m", prompt, sampling, stop=(stop,), deadline_seconds=60.0)
    running = dispatcher.RequestDispatcher(completion, world.services)
    deltas: BatchQueue[Any] = BatchQueue()
    running.start(deltas)
    async with asyncio.timeout(10):
        (delta,) = await deltas.take()
        assert delta.finish == "stop" and not await deltas.take()
    assert running.complete
    await world.services.finish(5.0)
    assert world.attempts[0].closed, "its workers are told"


class _Parser:
    """Fails at its third piece, or where a resumed answer is read again."""

    called = unfinished = False

    def __init__(self) -> None:
        self.fed = 0

    def feed(self, pieces: Any) -> Any:
        self.fed += 1
        if self.fed == 3:
            raise AttributeError("a fault of the parser")
        return []

    def end(self) -> Any:
        return []


@pytest.mark.parametrize("resumed", [0, 4])
async def test_a_parser_that_fails_ends_its_request_alone(text, monkeypatch, caplog, resumed):
    """No attempt follows, no worker is blamed, and the link's callback raises nothing."""
    world = World(text, [])
    monkeypatch.setattr(dispatcher, "Attempt", world.attempt)
    source: Any = SimpleNamespace(marker_texts={}, parser=_Parser, name="failing")
    prompt = list(range(3, 3 + PROMPT))
    resume = [token(PROMPT + index).token_id for index in range(resumed)]
    sampling = common_pb2.SamplingParams(max_tokens=NEW)
    completion = Completion("r", "m", prompt, sampling, answer_format=source, resume_tokens=resume)
    world.services.tickets.check = lambda *_: True  # type: ignore[method-assign]
    running = dispatcher.RequestDispatcher(completion, world.services)
    deltas: BatchQueue[Any] = BatchQueue()
    running.start(deltas)

    async def drained() -> None:
        while await deltas.take():
            pass

    with pytest.raises(UnreadableAnswerError, match="AttributeError"):
        await asyncio.wait_for(drained(), 10)
    await world.services.finish(5.0)
    assert "a fault of the parser" in caplog.text
    assert len(world.attempts) == (0 if resumed else 1)
    assert all((one.closed or one.has_ended) and one.playing.done() for one in world.attempts)
    assert world.released == [one.transfer_id for one in world.attempts]
