"""Log probabilities of a prompt before an answer that another worker sends: whatever fails, clients get the prompt first,
and each position once."""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from cluster.errors import PeerLostError
from router.dispatch import dispatcher
from router.dispatch.attempt_events import Source
from router.dispatch.batch_queue import BatchQueue
from router.dispatch.held_answer import TOKENS_PER_TURN, HeldAnswer
from router.link.handle import Reader
from router.placement.calibration import Calibration
from router.placement.types import KvGroup
from router.request.completion import Completion
from tests.router.dispatch.scripted_attempts import World, end
from wire import common_pb2, decode_pb2

P, D = Source.PREFILL, Source.DECODE
PROMPT, NEW = 5, 4
TOKENS = list(range(3, 3 + PROMPT))


@dataclass
class Worker:
    """Sends one attempt's messages over a stub of its link, one for each `step`."""

    reader: Reader
    number: int
    messages: deque[Any] = field(default_factory=deque)
    sent: list[common_pb2.Token] = field(default_factory=list)
    over: bool = False  # has ended, is lost, or was cancelled
    credits: dict[int, int] = field(default_factory=dict)

    @property
    def reference(self) -> common_pb2.HandleRef:
        return common_pb2.HandleRef(incarnation=1, number=self.number)

    def credit(self, choice: int, limit: int) -> None:
        self.credits[choice] = limit

    async def cancel(self, seconds: float) -> bool:
        self.over = True
        return True

    def close(self) -> None:
        self.over = True

    def step(self) -> None:
        if self.over or not self.messages:
            return
        message = self.messages.popleft()
        if isinstance(message, common_pb2.AttemptEnd):
            self.ends(message)
        else:
            self.sent.append(message)
            self.reader.token(message)

    def ends(self, message: common_pb2.AttemptEnd) -> None:
        if not self.over:
            self.over = True
            self.reader.ended(message)

    def lost(self) -> None:
        if not self.over:
            self.over = True
            self.reader.lost(PeerLostError("gone"))

    def attach(self, first: int, count: int) -> None:
        """Its link breaks: it goes on at the positions that the router names, one for each choice of its log."""
        positions = dict(enumerate(self.reader.positions(), first))
        if self.over:
            return
        assert len(positions) == len(self.reader.limits()) == count
        again = [one for one in self.sent if one.position >= positions[one.choice]]
        self.sent = [one for one in self.sent if one not in again]
        self.messages.extendleft(reversed(again))


class Pair:
    """Both workers of one attempt."""

    def __init__(self, spec: common_pb2.GenerateSpec, prefill: Worker, decode: Worker, *, one: bool = False):
        """`one`: the first token of each choice is its last one."""
        self.spec, self.of = spec, {P: prefill, D: decode}
        choices = range(spec.first_choice, spec.first_choice + spec.n)
        begin = (len(spec.prompt_tokens) + len(spec.output_tokens)) // 4
        rows = [[self.token(choice, at, one) for choice in choices] for at in range(begin, PROMPT + NEW)]
        self.scored = spec.sampling.prompt_logprobs
        for position in range(1, PROMPT) if self.scored else ():
            scores = common_pb2.Token(
                choice=choices.stop, position=position, token_id=TOKENS[position], rank=1
            )
            prefill.messages.append(scores)
        prefill.messages += [*rows[0], end("DONE")]
        if one:
            decode.messages.append(end("ABORTED"))
        else:
            decode.messages += [*(token for row in rows for token in row), end("DONE")]

    @staticmethod
    def token(choice: int, position: int, one: bool) -> common_pb2.Token:
        last = one or position == PROMPT + NEW - 1
        finish = common_pb2.FINISH_REASON_LENGTH if last else common_pb2.FINISH_REASON_UNSPECIFIED
        return common_pb2.Token(choice=choice, position=position, token_id=10 + position, finish=finish)

    def play(self, step: str) -> None:
        actor, _, what = step.partition(" ")
        source = P if actor == "p" else D
        worker = self.of[source]
        match what:
            case "":
                worker.step()
            case "lost":
                worker.lost()
            case "attach":
                worker.attach(self.spec.first_choice, self.spec.n + (self.scored and source is P))
            case _:
                worker.ends(end(what.upper(), PeerLostError("x")))


class Handed(World):
    """A router whose attempts run as they do, over links that scripts drive."""

    def __init__(self, text: Any, scripts: list[list[str]], *, one: bool = False, stand_still: bool = False):
        """`stand_still`: behind its script an attempt does nothing more."""
        super().__init__(text, [])
        self.steps, self.one, self.stand_still = list(scripts), one, stand_still
        self.pairs: list[Pair] = []
        self.opened: list[Worker] = []
        self.playing: set[asyncio.Task[None]] = set()
        services: Any = self.services
        services.links = services.channels = self

    suspects = frozenset[str]()

    def not_reached(self, name: str) -> None: ...

    def reached(self, name: str) -> None: ...

    def open(self, worker: Any, reader: Reader) -> Worker:
        self.opened.append(Worker(reader, len(self.opened)))
        return self.opened[-1]

    def prefill(self, address: str, control: bool = False) -> Any:
        return SimpleNamespace(Run=self.run)

    def decode(self, address: str, control: bool = False) -> Any:
        return SimpleNamespace(Abort=self.abort)

    async def abort(self, request: Any, timeout: float) -> decode_pb2.AbortResponse:
        pair = next(one for one in self.pairs if one.of[D].reader.transfer_id == request.transfer_id)
        committed = bool(pair.of[D].sent) and not pair.of[D].over
        states = (decode_pb2.ATTEMPT_STATE_ABORTED, decode_pb2.ATTEMPT_STATE_COMMITTED)
        return decode_pb2.AbortResponse(state=states[committed])

    async def run(self, request: Any, timeout: float) -> None:
        prefill, decode = (self.opened[one.number] for one in (request.handle, request.decode_handle))
        pair = Pair(request.spec, prefill, decode, one=self.one)
        self.pairs.append(pair)
        steps = self.steps.pop(0) if self.steps else []
        self.playing.add(asyncio.ensure_future(self.follow(pair, steps)))

    async def follow(self, pair: Pair, steps: list[str]) -> None:
        for step in steps:
            pair.play(step)
            await asyncio.sleep(0)
        while not self.stand_still and not all(worker.over for worker in pair.of.values()):
            pair.play("d")
            pair.play("p")
            await asyncio.sleep(0)


@dataclass
class Delivered:
    prompts: dict[int, list[int]] = field(default_factory=dict)
    answers: dict[int, list[int]] = field(default_factory=dict)
    early: list[int] = field(default_factory=list)  # choices whose answer began before the prompt's end


async def deliver(world: Handed, n: int, resumed: int = 0) -> Delivered:
    sampling = common_pb2.SamplingParams(max_tokens=NEW, prompt_logprobs=True)
    resume = [10 + PROMPT + index for index in range(resumed)]
    completion = Completion("r", "m", TOKENS, sampling, n=n, resume_tokens=resume, deadline_seconds=20.0)
    world.services.tickets.check = lambda *_: True  # type: ignore[method-assign]
    deltas: BatchQueue[Any] = BatchQueue()
    running = dispatcher.RequestDispatcher(completion, world.services)
    running.start(deltas)
    got = Delivered({i: [] for i in range(n)}, {i: [] for i in range(n)})
    while batch := await deltas.take():
        for delta in batch:
            got.prompts[delta.choice] += [token.position for token in delta.prompt]
            got.answers[delta.choice] += [token.position for token in delta.tokens]
            if delta.tokens and len(got.prompts[delta.choice]) < PROMPT - 1:
                got.early.append(delta.choice)
    assert running.complete
    await world.services.finish(5.0)
    await asyncio.gather(*world.playing)
    return got


STEPS = st.sampled_from(
    [
        *4 * ["p", "d"],
        *[
            "p attach",
            "d attach",
            "p lost",
            "d lost",
            "p aborted",
            "d aborted",
            "d preempted",
            "p done",
            "d done",
        ],
    ]
)


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(scripts=st.lists(st.lists(STEPS, max_size=14), max_size=4), n=st.integers(1, 2))
@example([["p", "p", "p lost"]], 2).via("the prefill worker is killed within the prompt")
@example([[*9 * ["d"], "p", "p lost"]], 1).via("and the decode worker has ended")
@example([[*3 * ["d"], "p", "d lost"]], 1).via("the decode worker is lost while its tokens are held")
@example([[*3 * ["d"], "d attach", *4 * ["p"], "d attach"]], 2).via("links break while tokens are held")
@example([[*8 * ["p"], "p done", "d", "d lost"]], 2).via("the prompt is complete, and not sent again")
@example([["p", "p done"]], 1).via("a prefill worker that ends too early")
def test_the_prompt_comes_once_and_first(text, scripts, n):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("router.dispatch.retry_policy.RETRY_PAUSE_SECONDS", 0.001)

        async def play() -> tuple[Handed, Delivered]:
            world = Handed(text, scripts)
            return world, await asyncio.wait_for(deliver(world, n), 20)

        world, got = asyncio.run(play())
    assert got.prompts == {i: list(range(1, PROMPT)) for i in range(n)}
    assert got.answers == {i: list(range(PROMPT, PROMPT + NEW)) for i in range(n)}
    assert not got.early
    whole = [pair.scored for pair in world.pairs]
    assert whole == sorted(whole, reverse=True), "asked for again though the client has it"
    assert all(worker.over for worker in world.opened), "a worker was not told"
    assert len(world.released) == len(world.pairs), "a charge that stays"


@pytest.mark.parametrize(("steps", "stays"), [(["p", "p", "p lost"], True), (["p lost"], False)])
async def test_a_prompt_that_the_client_has_in_part_stays_with_its_kv_group(text, monkeypatch, steps, stays):
    """In a roll the rest came from another version of the model."""
    world = Handed(text, [steps])
    before: list[KvGroup | None] = []

    def kv_group(group: KvGroup | None, *_: Any) -> KvGroup:
        before.append(group)
        return KvGroup("m", 16, b"")

    monkeypatch.setattr(world, "kv_group", kv_group)
    await asyncio.wait_for(deliver(world, 1), 20)
    assert before == [None, KvGroup("m", 16, b"") if stays else None]


async def test_an_answer_of_one_token_does_not_fail_by_the_end_of_its_handoff(text):
    """Its reservation is aborted while the prompt is on its way."""
    world = Handed(text, [["d"]], one=True)
    got = await asyncio.wait_for(deliver(world, 2), 20)
    assert len(world.pairs) == 1
    assert got.prompts[1] == list(range(1, PROMPT)) and got.answers[1] == [PROMPT]


async def test_a_cancel_within_the_prompt_leaves_nothing(text):
    """The decode worker had no credit beyond its first window meanwhile, and its placement counts as prefilled."""
    world = Handed(text, [["p", *20 * ["d"]]], stand_still=True)
    prefilled: list[bytes] = []
    world.prefilled = prefilled.append  # type: ignore[assignment, method-assign]
    sampling = common_pb2.SamplingParams(max_tokens=NEW, prompt_logprobs=True)
    running = dispatcher.RequestDispatcher(Completion("r", "m", TOKENS, sampling), world.services)
    deltas: BatchQueue[Any] = BatchQueue()
    running.start(deltas)
    async with asyncio.timeout(10):
        (delta,) = await deltas.take()
        assert [token.position for token in delta.prompt] == [1]
        while not world.playing or not all(task.done() for task in world.playing):
            await asyncio.sleep(0)
        running.stop()
        while not world.released:
            await asyncio.sleep(0)
        await world.services.finish(5.0)
    (pair,) = world.pairs
    assert pair.of[D].sent and not pair.of[D].credits and not deltas._items
    assert prefilled == world.released and all(worker.over for worker in world.opened)


async def test_who_resumes_behind_the_prompt_does_not_get_it_again(text):
    world = Handed(text, [])
    got = await asyncio.wait_for(deliver(world, 1, resumed=2), 20)
    assert got.prompts == {0: []} and got.answers == {0: [PROMPT + 2, PROMPT + 3]}
    assert [pair.scored for pair in world.pairs] == [False]


async def test_scored_attempts_are_reported_as_such(text, monkeypatch):
    learned: list[bool] = []
    monkeypatch.setattr(Calibration, "learn", lambda *_, scored: learned.append(scored))
    await asyncio.wait_for(deliver(Handed(text, []), 1), 20)
    await asyncio.wait_for(deliver(Handed(text, []), 1, resumed=2), 20)
    assert learned == [True, True, False, False]


async def test_a_failed_token_of_a_held_answer_ends_the_attempt(text):
    """Nothing else would: it is passed on in a callback of its own."""
    broken: list[str] = []
    taken: list[int] = []

    def take(token: Any) -> None:
        taken.append(token.position)
        if len(taken) == TOKENS_PER_TURN + 1:
            raise AttributeError("a fault")

    held = HeldAnswer(take, lambda _: None, lambda error: broken.append(str(error)))
    for position in [*range(50), *range(100)]:  # a link that broke repeats some
        assert held.holds(common_pb2.Token(position=position))
    held.prompt_complete()
    assert taken == list(range(TOKENS_PER_TURN)), "each once"
    assert len(taken) == TOKENS_PER_TURN and held.holds(common_pb2.Token(position=100))
    await asyncio.sleep(0.01)
    assert broken == ["AttributeError: a fault"]


class Embedded(Handed):
    """Its prefill worker is lost, or says that it is done, once behind the embedding, before the token that ends the
    attempt."""

    ends_early = False
    asked = 0  # times that a decode worker was asked whether it has committed

    async def run(self, request: Any, timeout: float) -> None:
        worker = self.opened[request.handle.number]
        vector = common_pb2.Token(choice=1, position=1, token_id=TOKENS[-1], embedding=bytes(8))
        last = Pair.token(0, PROMPT, one=True)
        worker.messages += [vector, last, end("DONE")]
        worker.step()
        if len(self.opened) == 1:
            worker.ends(end("DONE")) if self.ends_early else worker.lost()
        while not worker.over:
            worker.step()

    async def abort(self, request: Any, timeout: float) -> decode_pb2.AbortResponse:
        self.asked += 1
        return decode_pb2.AbortResponse(state=decode_pb2.ATTEMPT_STATE_ABORTED)


@pytest.mark.parametrize("ends_early", [False, True])
async def test_an_attempt_behind_an_embedding_repeats_it(text, ends_early):
    """Its worker may make nothing else, so it is asked for the embedding again, which clients do not get twice. No decode
    worker goes on where a prefill worker has ended too early."""
    world = Embedded(text, [])
    world.ends_early = ends_early
    sampling = common_pb2.SamplingParams(max_tokens=1, pooling=common_pb2.POOLING_MEAN)
    completion = Completion("r", "m", TOKENS, sampling, prompt_only=True, embedding_dimensions=2)
    running = dispatcher.RequestDispatcher(completion, world.services)
    deltas: BatchQueue[Any] = BatchQueue()
    running.start(deltas)
    vectors = 0
    async with asyncio.timeout(10):
        while batch := await deltas.take():
            vectors += sum(len(delta.prompt) for delta in batch)
    assert (vectors, len(world.opened), running.complete) == (1, 2, True)
    assert world.asked == 0, "the attempts end at their prefill worker"
    await world.services.finish(5.0)
    assert len(world.released) == 2
