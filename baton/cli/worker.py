"""`baton prefill` and `baton decode`: one worker in the foreground."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

from baton.cli.flags import Flags
from baton.cli.output import say
from baton.cli.serve import ConfigFile, ReadyFile, check_start, stop_event, write_ready
from baton.processes.force_exit import end_surely
from cluster.config import sources
from cluster.config.worker import Role, WorkerConfig
from cluster.telemetry import logs

WORKER = Flags(WorkerConfig)


def _command(role: Role) -> Callable[..., None]:
    @WORKER.add_to
    def run(config: ConfigFile = None, ready_file: ReadyFile = None, **flags: Any) -> None:
        resolved = sources.load(WorkerConfig, {**WORKER.values(WorkerConfig, flags), "role": role}, config)
        check_start(resolved, ready_file)
        import uvloop

        uvloop.run(_run(resolved, ready_file))

    run.__doc__ = f"""Run one {role} worker in the foreground.

    Each setting is a flag here, an environment variable (BATON_PORT, BATON_ENGINE__DTYPE) and a field of the YAML file
    that --config names; the flag wins over the variable, the variable over the file. docs/settings.md lists them all.
    """
    return run


prefill = _command("prefill")
decode = _command("decode")


def _end_at_once(*_: object) -> None:
    # Not by an exception: raised inside a library's compiled code it comes out as an error of that library's. Ranks
    # end when their leader does.
    os._exit(0)


async def _run(config: WorkerConfig, ready_file: Path | None) -> None:
    try:
        await _serve(config, ready_file)
    finally:
        end_surely()


async def _serve(config: WorkerConfig, ready_file: Path | None) -> None:
    from baton.workers import start_worker

    logs.configure(config.worker_id)
    # The loop does not turn while a model is loaded, and nothing is lost by ending there and then.
    signal.signal(signal.SIGTERM, _end_at_once)
    worker = await start_worker(config)
    gc.freeze()  # the modules' objects stay to the end, where collections would take most of the time of the exit
    stop = stop_event()
    say(f"{worker.worker_id} serves {config.role} on {worker.address}")
    facts: dict[str, Any] = {
        "id": worker.worker_id,
        "role": config.role,
        "pid": os.getpid(),
        "address": worker.address,
        "metrics": worker.metrics_address,
    }
    write_ready(ready_file, facts)
    failed = asyncio.create_task(worker.wait_failed())
    reasons = [failed, asyncio.create_task(stop.wait()), asyncio.create_task(worker.wait_drain_wanted())]
    await asyncio.wait(reasons, return_when=asyncio.FIRST_COMPLETED)
    say(f"{worker.worker_id} is leaving")
    await worker.stop()
    if failed.done():
        raise SystemExit(f"{worker.worker_id} failed: {failed.result()!r}")
    for reason in reasons:
        reason.cancel()
