"""Runs configurations and returns their report."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack

from rich.console import Console

from loadgen.config import LoadConfig
from loadgen.grpc_target import GrpcTarget
from loadgen.http_target import HttpTarget
from loadgen.key_watch import KeyRefused, KeyWatch
from loadgen.progress import show_progress
from loadgen.record import RequestRecord
from loadgen.report import Report
from loadgen.runner import Runner, run_clock
from loadgen.target import Clock, RequestFailed, Target
from loadgen.workload import make_workload

_WARMUP_SEED = 1 << 40  # warm-up prompts share nothing with the measured ones


async def run(config: LoadConfig, *, console: Console | None = None) -> Report:
    """Run one configuration; with a console, show a progress bar on it."""
    return await run_all([config], console=console)


async def run_all(configs: Sequence[LoadConfig], *, console: Console | None = None) -> Report:
    """Run several at the same time, on one clock, into one report. Raises KeyRefused."""
    for config in configs:
        await _warm_up(config)
    started_unix = time.time()
    clock = run_clock()
    key_watch = KeyWatch((address, config.api_key) for config in configs for address in config.addresses)
    async with AsyncExitStack() as stack:
        runners = [
            Runner(config, _open_targets(config, clock, stack), make_workload(config), clock, key_watch)
            for config in configs
        ]
        shown = asyncio.create_task(show_progress(configs, runners, clock, console))
        try:
            await _run_together(runners)
        finally:
            shown.cancel()
            await asyncio.gather(shown, return_exceptions=True)
    key_watch.check()
    return Report(tuple(configs), [record for runner in runners for record in runner.records], started_unix)


async def _run_together(runners: Sequence[Runner]) -> None:
    try:
        async with asyncio.TaskGroup() as running:
            for runner in runners:
                running.create_task(runner.run())
    except* KeyRefused:
        pass  # raised by KeyWatch.check, without groups around it


def open_target(config: LoadConfig, address: str, clock: Clock) -> Target:
    """`clock` returns the seconds since the run began."""
    kind = GrpcTarget if config.protocol == "grpc" else HttpTarget
    return kind(config, address, clock)


def _open_targets(config: LoadConfig, clock: Clock, stack: AsyncExitStack) -> list[Target]:
    targets: list[Target] = []
    for address in config.addresses:
        target = open_target(config, address, clock)
        stack.push_async_callback(target.close)
        targets.append(target)
    return targets


async def _warm_up(config: LoadConfig) -> None:
    """Send requests one by one, to each target in turn. Failures are ignored: the measured run reports them."""
    if config.warmup_requests == 0:
        return
    workload = make_workload(config.model_copy(update={"seed": config.seed + _WARMUP_SEED}))
    clock = run_clock()
    async with AsyncExitStack() as stack:
        targets = _open_targets(config, clock, stack)
        for index in range(config.warmup_requests):
            prompt = workload(index).next(None)
            assert prompt is not None
            record = RequestRecord(config.protocol, index, 0, clock())
            try:
                async with asyncio.timeout(config.timeout_seconds):
                    await targets[index % len(targets)].send(prompt, record)
            except (RequestFailed, TimeoutError):
                continue
