"""Requests whose attempts end with errors of the engine."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from cluster.errors import (
    BatonError,
)
from router.dispatch import dispatcher
from router.dispatch.attempt_events import Source
from router.text.tokenizer import ModelText
from tests.router.dispatch.scripted_attempts import Scripted, World, deliver, end


class Failing(World):
    """The first attempts fail as given, at P or D, after a number of tokens; later ones succeed."""

    def __init__(self, text: ModelText, ends: Sequence[tuple[Source, BatonError, int]]):
        super().__init__(text, [])
        self.ends = ends

    def attempt(self, **facts: object) -> Scripted:
        made = super().attempt(**facts)
        number = len(self.attempts) - 1
        if number < len(self.ends):
            source, error, tokens = self.ends[number]
            made.start = lambda: self.fail(made, source, error, tokens)  # type: ignore[method-assign]
        return made

    def fail(self, made: Scripted, source: Source, error: BatonError, tokens: int) -> None:
        position = made.from_position
        for _ in range(tokens):
            position = made.play("next", position)
        made.ends(source, end("ABORTED", error))


async def run(world: Failing, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(dispatcher, "Attempt", world.attempt)
    async with asyncio.timeout(60):
        return len(await deliver(world))
