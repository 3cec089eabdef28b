"""`python -m tests.chaos.cancels --cancels 10000`: requests that are cancelled at random moments, and what stays behind.

Each round lets a handful of streams run, cancels every one at a moment drawn from the seed (before its first token, in
the middle, at its end), and then waits until no worker holds anything: no block, no slot, no attempt. The time is
counted from the round's last cancel, and holds the age of the statuses it is read from (0.5 s, and 0.25 s more).
"""

from __future__ import annotations

import asyncio
import random
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from baton.client import AsyncClient
from cluster.errors import BatonError
from tests.chaos.chaos_cluster import run_chaos_cluster
from tests.chaos.invariants import leaks
from tests.chaos.requests import draw_ask
from tests.chaos.results import percentile
from tests.chaos.target import Target
from tests.checkpoints import make_checkpoint

RECLAIM_SECONDS = 2.0
console = Console(width=120, highlight=False)


@dataclass
class Cancels:
    """What has been seen so far."""

    cancelled: int = 0
    before_first_token: int = 0
    tokens: int = 0
    ended_first: int = 0  # the answer was quicker than the cancel
    reclaimed_seconds: list[float] = field(default_factory=list)
    leaks: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)

    def line(self) -> str:
        reclaimed = self.reclaimed_seconds
        return (
            f"{self.cancelled} cancelled ({self.before_first_token} before their first token, {self.tokens} tokens "
            f"seen, {self.ended_first} had ended), reclaimed p50 {percentile(reclaimed, 0.5):.2f} "
            f"p99 {percentile(reclaimed, 0.99):.2f} max {max(reclaimed, default=0.0):.2f} s, "
            f"leaks {len(self.leaks)}, errors {len(self.errors)}"
        )


async def run_cancels(target: Target, count: int, seed: str, together: int, seen: Cancels) -> None:
    """Until `count` streams have been cancelled."""
    rng = random.Random(f"cancels:{seed}")
    async with AsyncClient(target.grpc) as client:
        while seen.cancelled < count:
            await asyncio.gather(*(_one(client, rng, seen) for _ in range(together)))
            began = time.monotonic()
            seen.leaks += await leaks(target)
            seen.reclaimed_seconds.append(time.monotonic() - began)
    await asyncio.sleep(1.0)  # by now no status is older than the last cancel
    seen.leaks += await leaks(target)


async def _one(client: AsyncClient, rng: random.Random, seen: Cancels) -> None:
    ask = draw_ask(rng)
    # Most of what can go wrong lies in the first milliseconds: queue, reservation, parts, commit.
    patience = rng.choice((rng.uniform(0.0, 0.02), rng.uniform(0.0, 0.2), rng.uniform(0.0, 1.0)))
    tokens = 0
    stream = client.stream(ask.prompt, timeout_seconds=60.0, **ask.options())
    try:
        async with asyncio.timeout(patience), stream:
            async for chunk in stream:
                tokens += len(chunk.token_ids)
        seen.ended_first += 1
    except TimeoutError:
        seen.cancelled += 1
        seen.before_first_token += not tokens
    except BatonError as error:
        seen.errors.append(f"{type(error).__name__}: {error}")
    seen.tokens += tokens


def main(
    cancels: Annotated[int, typer.Option(help="Streams to cancel.")] = 10_000,
    seed: Annotated[str, typer.Option()] = "1",
    together: Annotated[int, typer.Option(help="Streams at once.")] = 24,
) -> None:
    seen = Cancels()
    with tempfile.TemporaryDirectory(prefix="cancels-") as scratch:
        model = make_checkpoint(Path(scratch) / "model")
        with run_chaos_cluster(Path(scratch) / "chaos", model) as cluster:
            for step in range(500, cancels + 500, 500):
                asyncio.run(run_cancels(cluster.target, min(step, cancels), f"{seed}:{step}", together, seen))
                console.print(seen.line())
    for problem in [*seen.leaks, *seen.errors]:
        console.print(problem, style="red")
    slow = max(seen.reclaimed_seconds, default=0.0) > RECLAIM_SECONDS
    raise typer.Exit(1 if seen.leaks or seen.errors or slow else 0)


if __name__ == "__main__":
    typer.run(main)
