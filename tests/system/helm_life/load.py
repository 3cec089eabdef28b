"""Users that keep asking while something is done to the cluster; every answer is compared with an undisturbed one."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from baton.client import AsyncClient
from cluster.errors import BatonError
from tests.exactness import judge

PROMPTS = 12
PROMPT_TOKENS = 48
ANSWER_TOKENS = 64
REQUEST_SECONDS = 120.0
LOWEST_TOKEN, HIGHEST_TOKEN = 10, 1000
OPTIONS: dict[str, Any] = {"temperature": 0, "ignore_eos": True, "max_tokens": ANSWER_TOKENS}


def prompt(number: int) -> list[int]:
    span = HIGHEST_TOKEN - LOWEST_TOKEN
    return [LOWEST_TOKEN + (number * 7919 + place * 104729) % span for place in range(PROMPT_TOKENS)]


@dataclass
class Outcome:
    """What the users saw. Times are `time.monotonic`'s."""

    spans: list[tuple[float, float]] = field(default_factory=list)
    answers: set[tuple[int, tuple[int, ...]]] = field(default_factory=set)
    failures: list[str] = field(default_factory=list)
    reconnects: int = 0

    def overlapping(self, begin: float, end: float) -> int:
        """Requests that were in flight at some time between."""
        return len([span for span in self.spans if span[0] < end and span[1] > begin])

    def wrong(self, model: Path) -> list[str]:
        """Answers that are not what the reference says token by token; near-ties are not wrong."""
        found = []
        for number, tokens in sorted(self.answers):
            judged = judge(model, prompt(number), list(tokens))
            if judged.wrong or len(tokens) != ANSWER_TOKENS:
                found.append(f"prompt {number}: {len(tokens)} tokens, wrong at {judged.wrong}")
        return found


async def ask_during(
    target: str, users: int, least: int, work: Awaitable[None]
) -> tuple[Outcome, tuple[float, float]]:
    """`users` ask one after the other until `work` is done, and `least` requests were in flight meanwhile.

    `target` is an address behind which several routers are. Answers what happened, and when `work` ran.
    """
    outcome = Outcome()
    done = asyncio.Event()
    # A broken stream goes on at another router of the same address.
    async with AsyncClient((target,), timeout_seconds=REQUEST_SECONDS, max_reconnects=8) as client:
        asking = [asyncio.create_task(_user(client, user, users, outcome, done)) for user in range(users)]
        while not outcome.spans and not outcome.failures:
            await asyncio.sleep(0.05)
        began = time.monotonic()
        try:
            await work
            ended = time.monotonic()
            while outcome.overlapping(began, time.monotonic()) < least and not outcome.failures:
                await asyncio.sleep(0.05)
        finally:
            done.set()
            await asyncio.gather(*asking)
    return outcome, (began, ended)


async def _user(client: AsyncClient, user: int, users: int, outcome: Outcome, done: asyncio.Event) -> None:
    number = user
    while not done.is_set():
        began = time.monotonic()
        try:
            answer = await client.generate(prompt(number % PROMPTS), **OPTIONS)
        except BatonError as error:
            outcome.failures.append(f"{type(error).__name__}: {error}")
            await asyncio.sleep(0.2)
        else:
            outcome.answers.add((number % PROMPTS, tuple(answer.token_ids)))
            outcome.reconnects += answer.reconnects
        outcome.spans.append((began, time.monotonic()))
        number += users + 1
