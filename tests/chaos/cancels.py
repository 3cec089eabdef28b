"""`make cancels CANCELS=10000`: requests that are cancelled at random moments, and what stays behind.

Each round starts a crowd of streams so that all of them are cancelled within a tenth of a second, each at another moment
of its life drawn from the seed (before its first token, in the middle, at its end). Then it waits until no worker holds
anything: no block, no slot, no attempt. The time to reclaim is counted from the round's first cancel to the first look
from which on nothing is held, until no status can be older than the last cancel; statuses are up to 0.5 s old, and that
is part of it. One line a round is appended to the results file; the same command goes on after the last line of its seed.
"""

from __future__ import annotations

import asyncio
import json
import random
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated

import httpx
import typer
from rich.console import Console

from baton.client import AsyncClient
from cluster.errors import BatonError
from tests.chaos.chaos_cluster import run_chaos_cluster
from tests.chaos.invariants import QUIET_SECONDS, look
from tests.chaos.requests import Request, draw_request
from tests.chaos.results import percentile
from tests.chaos.target import Target
from tests.harness.bounds import RECLAIM_SECONDS
from tests.harness.checkpoints import make_checkpoint

LONGEST_SECONDS = 1.0  # of a stream's life
SPREAD_SECONDS = 0.1  # of a round's cancels
STATUS_SECONDS = 1.0  # workers publish every 0.5 s
POLL_SECONDS = 0.05
OUT = Path("out/cancels")
console = Console(width=150, highlight=False)


@dataclass
class Round:
    """Counts and times of one round."""

    seed: str
    number: int
    cancelled: int = 0
    before_first_token: int = 0
    tokens: int = 0
    ended_first: int = 0  # the answer was quicker than the cancel
    seconds: float = 0.0
    reclaimed_seconds: float = 0.0
    held_last: list[str] = field(default_factory=list)  # what was reclaimed last
    leaks: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)


@dataclass
class _Crowd:
    round: Round
    client: AsyncClient
    first_cancel: float = float("inf")


async def run_cancels(
    target: Target, seed: str, number: int, together: int, wait_seconds: float = QUIET_SECONDS
) -> Round:
    """One round. What is still held after `wait_seconds` has leaked."""
    rng = random.Random(f"cancels:{seed}:{number}")
    began = time.monotonic()
    async with AsyncClient(target.grpc) as client:
        crowd = _Crowd(Round(seed, number), client)
        streams = []
        for _ in range(together):
            request = draw_request(rng)
            # Most of what can go wrong lies in the first milliseconds: queue, reservation, parts, commit.
            life = rng.choice(
                (rng.uniform(0.0, 0.02), rng.uniform(0.0, 0.2), rng.uniform(0.0, LONGEST_SECONDS))
            )
            streams.append(_one(crowd, request, life, rng.uniform(0.0, SPREAD_SECONDS)))
        await asyncio.gather(*streams)
    seen = crowd.round
    if seen.cancelled:
        await _reclaimed(target, crowd, wait_seconds)
    seen.seconds = time.monotonic() - began
    return seen


async def _one(crowd: _Crowd, request: Request, life_seconds: float, late_seconds: float) -> None:
    await asyncio.sleep(LONGEST_SECONDS - life_seconds + late_seconds)
    seen, tokens = crowd.round, 0
    cancelled_at = time.monotonic() + life_seconds
    stream = crowd.client.stream(request.prompt, timeout_seconds=60.0, **request.options())
    try:
        async with asyncio.timeout(life_seconds), stream:
            async for chunk in stream:
                tokens += len(chunk.token_ids)
        seen.ended_first += 1
    except TimeoutError:
        seen.cancelled += 1
        seen.before_first_token += not tokens
        crowd.first_cancel = min(crowd.first_cancel, cancelled_at)
    except BatonError as error:
        seen.errors.append(f"{type(error).__name__}: {error}")
    seen.tokens += tokens


async def _reclaimed(target: Target, crowd: _Crowd, wait_seconds: float) -> None:
    """Waits until nothing is held; what still is after `wait_seconds` has leaked."""
    seen, since = crowd.round, crowd.first_cancel
    fresh, clean = time.monotonic() + STATUS_SECONDS, 0.0
    while True:
        try:
            found = await look(target)
        except (httpx.HTTPError, OSError, ValueError) as error:
            found = [f"{type(error).__name__}: {error}"]
        now = time.monotonic()
        clean = 0.0 if found else clean or now
        seen.held_last = found or seen.held_last
        seen.reclaimed_seconds = (clean or now) - since
        if clean and now >= fresh:
            return
        if now - since > wait_seconds + STATUS_SECONDS:
            seen.leaks = found
            return
        await asyncio.sleep(POLL_SECONDS)


def summary(rounds: Sequence[Round]) -> str:
    times = [one.reclaimed_seconds for one in rounds if one.cancelled]
    longest = max(times, default=0.0)
    return (
        f"{_sum(rounds, 'cancelled'):.0f} cancelled ({_sum(rounds, 'before_first_token'):.0f} before their first token, "
        f"{_sum(rounds, 'tokens'):.0f} tokens seen, {_sum(rounds, 'ended_first'):.0f} had ended) in "
        f"{_sum(rounds, 'seconds'):.0f} s, reclaimed p50 {percentile(times, 0.5):.2f} "
        f"p99 {percentile(times, 0.99):.2f} max {longest:.2f} s, "
        f"leaks {sum(len(one.leaks) for one in rounds)}, errors {sum(len(one.errors) for one in rounds)}"
    )


def _sum(rounds: Sequence[Round], name: str) -> float:
    return sum(getattr(one, name) for one in rounds)


def verdict(rounds: Sequence[Round]) -> list[str]:
    """What breaks the promise: nothing stays, nothing fails, everything is reclaimed in time."""
    problems = [f"round {one.number}: {what}" for one in rounds for what in (*one.leaks, *one.errors)]
    slow = [one for one in rounds if one.reclaimed_seconds > RECLAIM_SECONDS]
    return problems + [
        f"round {one.number}: reclaimed after {one.reclaimed_seconds:.2f} s, at last {'; '.join(one.held_last)}"
        for one in slow
    ]


def read(path: Path, seed: str) -> list[Round]:
    if not path.exists():
        return []
    lines = (json.loads(line) for line in path.read_text().splitlines())
    return [Round(**line) for line in lines if line["seed"] == seed]


def main(
    cancels: Annotated[
        int, typer.Option(help="Streams to cancel, with those of earlier runs of this seed.")
    ] = 10_000,
    seed: Annotated[str, typer.Option(help="Names the schedule.")] = "1",
    together: Annotated[int, typer.Option(help="Streams at once.")] = 60,
    out: Annotated[Path, typer.Option(help="Directory of results.")] = OUT,
) -> None:
    results = out / "results.jsonl"
    results.parent.mkdir(parents=True, exist_ok=True)
    rounds = read(results, seed)
    if rounds:
        console.print(f"seed {seed}: {len(rounds)} rounds done before")
    with tempfile.TemporaryDirectory(prefix="cancels-") as scratch:
        if _sum(rounds, "cancelled") < cancels:
            model = make_checkpoint(Path(scratch) / "model")
            with run_chaos_cluster(Path(scratch) / "chaos", model) as cluster:
                _campaign(cluster.target, rounds, cancels, seed, together, results)
    console.print(summary(rounds))
    if problems := verdict(rounds):
        console.print("\n".join(problems), style="red")
        raise typer.Exit(1)


def _campaign(
    target: Target, rounds: list[Round], cancels: int, seed: str, together: int, results: Path
) -> None:
    while _sum(rounds, "cancelled") < cancels:
        one = asyncio.run(run_cancels(target, seed, len(rounds), together))
        rounds.append(one)
        with results.open("a") as file:
            file.write(json.dumps(asdict(one)) + "\n")
        if len(rounds) % 10 == 0 or one.leaks or one.errors:
            console.print(summary(rounds))


if __name__ == "__main__":
    typer.run(main)
