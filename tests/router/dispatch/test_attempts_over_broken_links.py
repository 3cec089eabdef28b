"""Requests of a router over links that break, move and fall silent at random, with calls that are lost: real attempts,
handles, links and logs of both sides on virtual time. Every token comes once and in order, and nothing is left behind."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from cluster.errors import BatonError
from cluster.faults.points import Act, FaultAction
from cluster.protocol.first_token import ends_with_first_token
from router.dispatch import attempt as attempts
from router.dispatch.attempt import Attempt
from router.dispatch.attempt_events import Broken, Ended, Source
from router.link.links import Links
from router.link.opener import Opener
from router.link.token import Token
from router.placement.types import Placed
from tests.harness.virtual_network import Network, NetworkLoop
from tests.harness.virtual_workers import VirtualChannels, VirtualWorker, token_of
from wire import common_pb2

PROMPT = 3
PLAY_SECONDS = 12.0
END_SECONDS = 400.0  # for all requests, once everything is healed
REST_SECONDS = 75.0  # older connections are cut after 60 s


@dataclass(eq=False)
class Choice:
    """As router.dispatch.choice.ChoiceStream, without text."""

    index: int
    stops_at: int
    next_position: int = PROMPT
    finish: str | None = None

    @property
    def held(self) -> int:
        return self.next_position - PROMPT


class Request:
    """As router.dispatch.dispatcher.RequestDispatcher, without placement: it goes on until every choice has its end."""

    def __init__(self, world: World, choices: int, new: int, *, local: bool, logprobs: bool, slow: bool):
        self.world, self.new, self.local, self.logprobs, self.slow = world, new, local, logprobs, slow
        stops = world.random.random() < 0.3
        self.stop = stops
        last = PROMPT + new
        self.choices = [
            Choice(index, world.random.randrange(PROMPT + 1, last + 1) if stops else last)
            for index in range(choices)
        ]
        self._calls: list[Callable[[], None]] = []
        self._reading = asyncio.create_task(self._read())
        self.task = asyncio.create_task(self._run())

    async def _read(self) -> None:
        pauses = (0.0, 0.3, 2.0, 7.0) if self.slow else (0.0, 0.01)
        while True:
            await asyncio.sleep(self.world.random.choice(pauses) + 0.001)
            calls, self._calls = self._calls, []
            for call in calls:
                call()

    async def _run(self) -> None:
        try:
            await self._serve(self.choices)
        finally:
            self._reading.cancel()

    async def _serve(self, choices: list[Choice]) -> None:
        while any(choice.finish is None for choice in choices):
            await self._try_once(choices)
            if len(choices) > 1 and any(choice.held for choice in choices):
                unfinished = [choice for choice in choices if choice.finish is None]
                await asyncio.gather(*(self._serve([choice]) for choice in unfinished))
            await asyncio.sleep(0.02)

    async def _try_once(self, choices: list[Choice]) -> None:
        attempt = self._attempt(choices)
        try:
            attempt.start()
            await self._until_over(attempt, choices)
        finally:
            attempt.stop_reading()
            if not attempt.has_ended:
                self.world.cleanups.append(asyncio.create_task(attempt.close()))

    def _attempt(self, choices: list[Choice]) -> Attempt:
        world, held = self.world, choices[0].held if len(choices) == 1 else 0
        spec = common_pb2.GenerateSpec(
            prompt_tokens=bytes(4 * PROMPT),
            output_tokens=bytes(4 * held),
            sampling=common_pb2.SamplingParams(max_tokens=self.new, logprobs=self.logprobs),
            first_choice=choices[0].index,
            n=len(choices),
        )
        world.attempts += 1
        prefill = None if self.local else world.prefill.info
        return Attempt(
            request_id="r",
            spec=spec,
            placed=Placed(prefill, world.decode.info, 0, 0, False),
            channels=world.channels,
            links=world.links,
            choices=choices,  # type: ignore[arg-type]
            admission_seconds=30.0,
            take=self._take,
            when_drained=self._calls_append,
        )

    def _calls_append(self, call: Callable[[], None]) -> None:
        self._calls.append(call)

    def _take(self, token: Token, attempt: Attempt) -> bool:
        choice = self.choices[token.choice]
        if choice.finish is not None or token.position < choice.next_position:
            return False
        if (token.position, token.token_id) != (choice.next_position, token_of(token.position, choice.index)):
            self.world.wrong.append(f"{token} where {choice} was next")
            return False
        choice.next_position += 1
        self.world.tokens += 1
        if token.finish or choice.next_position >= choice.stops_at:
            choice.finish = "length" if token.finish else "stop"
            if all(one.finish is not None for one in attempt.choices):
                attempt.complete()
        return True

    async def _until_over(self, attempt: Attempt, choices: list[Choice]) -> None:
        """Return when every choice has its end, or the attempt is lost."""
        waiting = {Source.DECODE} if attempt.is_local else {Source.PREFILL, Source.DECODE}
        while True:
            for event in await attempt.events.take():
                if isinstance(event, Broken):
                    self.world.wrong.append(f"broken: {event.error}")
                    return
                if all(choice.finish is not None for choice in choices):
                    continue
                if isinstance(event, Ended) and await self._is_over(event, attempt):
                    return
            complete = all(choice.finish is not None for choice in choices)
            if complete and (self.stop or waiting <= attempt.finished | attempt.failed):
                return

    async def _is_over(self, event: Ended, attempt: Attempt) -> bool:
        if event.is_done:
            if event.source is Source.DECODE or ends_with_first_token(attempt.spec):
                self.world.wrong.append(f"{event.source} ended early")
                return True
            return False
        if event.source is Source.PREFILL and not ends_with_first_token(attempt.spec):
            try:
                return not await attempt.abort_unless_committed()
            except BatonError:
                return True
        return True


@dataclass
class World:
    loop: NetworkLoop
    seed: int
    wrong: list[str] = field(default_factory=list)
    cleanups: list[asyncio.Task[None]] = field(default_factory=list)
    requests: list[Request] = field(default_factory=list)
    tokens: int = 0
    attempts: int = 0

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        self.network = Network(self.loop, self.seed)
        self.decode, self.prefill = (
            VirtualWorker(name, role, self.network) for name, role in (("d", "decode"), ("p", "prefill"))
        )
        self.prefill.peer = self.decode
        self.workers = {"d": self.decode, "p": self.prefill}
        self.channels: Any = VirtualChannels(self.network, self.workers)
        self.links = Links("r")
        self.links._identity.at_credit = self._at_credit
        self._background: set[asyncio.Task[None]] = set()

    def _at_credit(self, whose: object) -> FaultAction | None:
        return FaultAction(Act.DROP) if self.random.random() < 0.05 else None

    async def play(self) -> None:
        ends = self.loop.time() + PLAY_SECONDS
        while self.loop.time() < ends:
            await asyncio.sleep(self.random.choice((0.01, 0.05, 0.2, 0.6)))
            self._act()

    def _act(self) -> None:
        draw = self.random
        kind = draw.choices(
            ("request", "cancel", "cut", "move", "ask", "stand", "hang", "drain"),
            (10, 4, 3, 1, 1, 1, 0.5, 0.3),
        )[0]
        name = draw.choice(("d", "d", "p"))
        match kind:
            case "request" if len(self.requests) < 40:
                new = draw.choice((1, 2, 30, 300, 700))
                local, logprobs, slow = draw.random() < 0.4, draw.random() < 0.2, draw.random() < 0.4
                choices = draw.choice((1, 1, 1, 2, 5))
                made = Request(self, choices, new, local=local, logprobs=logprobs, slow=slow)
                self.requests.append(made)
            case "cancel" if self.requests:
                draw.choice(self.requests).task.cancel()
            case "cut":
                how = draw.choice(("reset", "reset", "refused", "silent", "to", "from"))
                self._later(self._cut(name, how, draw.choice((0.001, 0.05, 0.2, 0.5, 1.0, 3.0, 6.0))))
            case "move":
                for link in self.links._links.values():
                    link.move()
            case "ask":
                self.workers[name].ask_to_move()
            case "stand":
                self.loop.stand_still(draw.choice((0.05, 0.3, 0.9, 3.0, 8.0)))
            case "hang":
                self._later(self._hang(self.workers[name], draw.choice((1.0, 3.0, 7.0))))
            case "drain":
                self.workers[name].drain()

    def _later(self, doing: Any) -> None:
        task = asyncio.create_task(doing)
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    async def _cut(self, name: str, how: str, seconds: float) -> None:
        self.network.cut(name, how)
        await asyncio.sleep(seconds)
        self.network.heal(name)

    async def _hang(self, worker: VirtualWorker, seconds: float) -> None:
        worker.hangs = True
        await asyncio.sleep(seconds)
        worker.hangs = False

    async def end(self) -> None:
        """Everything is healed; every request ends, and then nothing is left."""
        while self._background:
            await asyncio.sleep(0.1)
        limit = self.loop.time() + END_SECONDS
        while not all(request.task.done() for request in self.requests):
            assert self.loop.time() < limit, f"seed {self.seed}: requests hang: {self._state()}"
            await asyncio.sleep(0.5)
        await asyncio.sleep(REST_SECONDS)
        assert not self.wrong, f"seed {self.seed}: {self.wrong}"
        for request in self.requests:
            if not request.task.cancelled():
                request.task.result()
                assert all(one.next_position == one.stops_at for one in request.choices), self._state()
        assert all(task.done() for task in self.cleanups)
        for worker in self.workers.values():
            assert not len(worker.attempts) and not len(worker.attempts.routers), self._state()
            assert len(worker.open) <= 1, f"seed {self.seed}: connections are left"
        assert all(link.idle for link in self.links._links.values())

    def _state(self) -> str:
        return f"seed {self.seed}: " + "; ".join(
            f"{worker.worker_id}: {[(one.transfer_id.hex()[:6], one.paused, one.ended) for one in worker.attempts.all()]}"
            for worker in self.workers.values()
        )

    async def close(self) -> None:
        await self.links.close()
        for worker in self.workers.values():
            await worker.close()


async def scenario(loop: NetworkLoop, seed: int, worlds: list[World]) -> World:
    world = World(loop, seed)
    worlds.append(world)
    await world.play()
    await world.end()
    await world.close()
    return world


@pytest.fixture
def virtual(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], World]:
    def play(seed: int) -> World:
        loop = NetworkLoop()
        worlds: list[World] = []

        async def reach(opener: Opener, seconds: float) -> Any:
            return await worlds[0].network.reach(opener, seconds)

        monkeypatch.setattr(Opener, "_reach", reach)
        monkeypatch.setattr(attempts, "time", SimpleNamespace(monotonic=loop.time))
        try:
            return loop.run(scenario(loop, seed, worlds))
        finally:
            loop.close()

    return play


@pytest.mark.parametrize(
    "seed", [*range(6), *(pytest.param(one, marks=pytest.mark.long) for one in range(6, 60))]
)
def test_every_token_comes_once_and_nothing_is_left(virtual: Callable[[int], World], seed: int) -> None:
    world = virtual(seed)
    assert world.tokens > 0 and world.attempts > 0
