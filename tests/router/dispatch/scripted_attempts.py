"""Requests over attempts that follow scripts: what their workers send, and how they end."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from cluster.config.router import RouterConfig
from cluster.errors import BatonError, BlocksExhaustedError, PeerLostError
from cluster.membership.topology import Location
from router.dispatch import dispatcher
from router.dispatch.attempt import Attempt
from router.dispatch.attempt_events import Broken, Complete, Ended, Source
from router.dispatch.batch_queue import BatchQueue
from router.dispatch.choice import ChoiceStream
from router.dispatch.services import Services
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

    def received(self, source: Source, token: Token) -> None:
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
                    self.received(D, token(position))
                    position += 1
            case "first":
                if self.from_position < PROMPT + NEW:
                    self.received(P, token(self.from_position))
            case "again":
                if position > PROMPT:
                    self.received(D, token(max(PROMPT, position - 2)))
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

    def kv_group(self, before: KvGroup | None, model: str = "", failed: Collection[KvGroup] = ()) -> KvGroup:
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
