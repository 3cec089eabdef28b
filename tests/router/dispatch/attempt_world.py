"""Attempts against two scripted workers, over real calls and links."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from types import SimpleNamespace
from typing import Any

from cluster.protocol.block_hash import pack_tokens
from router.dispatch.attempt import Attempt
from router.dispatch.attempt_events import Ended, Source
from router.dispatch.prompt_stream import PromptStream
from router.link.token import Token
from tests.router.dispatch.scripted_workers import FIRST, TRANSFER, ScriptedPair
from wire import common_pb2


class Recorded(Attempt):
    """Keeps which worker each token came from."""

    def received(self, source: Source, token: Token) -> None:
        self.tokens.append((source, token.position))
        super().received(source, token)

    @cached_property
    def tokens(self) -> list[tuple[Source, int]]:
        return []

    def note(self, token: Token) -> bool:
        self.taken.append(token.position)
        return True

    @cached_property
    def taken(self) -> list[int]:
        """Positions."""
        return []


@dataclass
class World(ScriptedPair):
    made: list[Attempt] = field(default_factory=list)
    when_drained: list[Callable[[], None]] = field(default_factory=list)

    def attempt(
        self, *, local: bool = False, new: int = 100, held: int = 0, prompt: PromptStream | None = None
    ) -> Recorded:
        """`held`: output that the request has so far."""
        choice: Any = SimpleNamespace(index=0, next_position=FIRST, finish=None)
        made = Recorded(
            request_id="r",
            spec=common_pb2.GenerateSpec(
                model_id="m",
                prompt_tokens=pack_tokens(list(range(FIRST - held))),
                output_tokens=pack_tokens([7] * held),
                sampling=common_pb2.SamplingParams(max_tokens=new),
                n=1,
            ),
            placed=self.placed(local=local),
            channels=self.channels,
            links=self.links,
            choices=[choice],
            admission_seconds=2.5,
            take=lambda token, attempt: attempt.note(token),  # type: ignore[attr-defined]
            when_drained=self.when_drained.append,
            prompt=prompt,
            transfer_id=TRANSFER,
        )
        self.made.append(made)
        return made


def ends(found: list[Any]) -> dict[Source, Ended]:
    return {event.source: event for event in found if isinstance(event, Ended)}


def both(found: list[Any]) -> bool:
    return len(ends(found)) == 2


def any_end(found: list[Any]) -> bool:
    return bool(ends(found))
