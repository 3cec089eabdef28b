"""The progress bar of a run."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from loadgen.config import LoadConfig
from loadgen.runner import Runner
from loadgen.target import Clock

REFRESH_SECONDS = 0.25


async def show_progress(
    configs: Sequence[LoadConfig], runners: Sequence[Runner], clock: Clock, console: Console | None
) -> None:
    """Draw a few times per second until cancelled: more often would delay the requests that are measured."""
    if console is None:
        return
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(bar_width=28),
        TextColumn("{task.fields[done]}"),
        TimeElapsedColumn(),
        TextColumn("[dim]{task.fields[detail]}"),
    )
    with Progress(*columns, console=console, auto_refresh=False, transient=True) as bar:
        tasks = [bar.add_task(config.protocol, total=1.0, done="", detail="") for config in configs]
        while True:
            for task, config, runner in zip(tasks, configs, runners, strict=True):
                done, detail = _describe(config, runner, clock())
                bar.update(task, completed=_share(config, runner, clock()), done=done, detail=detail)
            bar.refresh()
            await asyncio.sleep(REFRESH_SECONDS)


def _share(config: LoadConfig, runner: Runner, now: float) -> float:
    if config.requests is not None:
        return runner.progress.finished / config.requests
    return min(1.0, now / (config.seconds or 1.0))


def _describe(config: LoadConfig, runner: Runner, now: float) -> tuple[str, str]:
    progress = runner.progress
    total = f"/{config.requests}" if config.requests is not None else ""
    failed = f", {progress.failed} failed" if progress.failed else ""
    rate = progress.output_tokens / now if now > 0 else 0.0
    in_flight = progress.started - progress.finished
    detail = f"{in_flight} running  {rate:.0f} tok/s  TTFT {progress.last_ttft * 1e3:.0f} ms"
    return f"{progress.finished}{total} requests{failed}", detail
