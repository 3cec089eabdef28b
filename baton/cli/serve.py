"""`baton router`, `baton prefill`, `baton decode`: one process in the foreground; what commands have in common."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from baton import safe_files
from baton.cli.flags import Flags
from baton.cli.output import tell
from baton.local.state import check_writable
from baton.processes.force_exit import end_surely
from baton.processes.without_gc import without_gc
from cluster.config import sources
from cluster.config.router import RouterConfig
from cluster.config.worker import Role, WorkerConfig
from cluster.redis.connect import why_silent
from cluster.redis.rights import Rights, too_few_rights
from cluster.redis.server import ask_why_unusable
from cluster.telemetry import logs

ConfigFile = Annotated[
    Path | None, typer.Option("--config", envvar="BATON_CONFIG", help="YAML file with these settings.")
]
ReadyFile = Annotated[
    Path | None,
    typer.Option(envvar="BATON_READY_FILE", help="Write addresses here (JSON) once serving."),
]
ROUTER = Flags(RouterConfig)
WORKER = Flags(WorkerConfig)


@ROUTER.add_to
def router(config: ConfigFile = None, ready_file: ReadyFile = None, **flags: Any) -> None:
    """Run one router: OpenAI HTTP and gRPC, placement, and the dispatch of every request.

    Each setting is a flag here, an environment variable (BATON_HTTP_PORT) and a field of the YAML file that --config
    names; the flag wins over the variable, the variable over the file. docs/settings.md lists them all.
    """
    from router.rights import redis_rights

    resolved = sources.load(RouterConfig, ROUTER.values(RouterConfig, flags), config)
    check_start(resolved, ready_file, redis_rights(resolved))
    import uvloop

    serve = _run_router if resolved.processes == 1 else _run_router_processes
    uvloop.run(serve(resolved, ready_file))


def check_start(
    config: RouterConfig | WorkerConfig, ready_file: Path | None, servers: Sequence[tuple[str, Rights]]
) -> None:
    """Check what can be checked before a model is loaded; `servers` are Redis's URLs, and the rights that it needs there.

    An unreachable Redis and missing rights are only reported, because either may come later. Raises ConfigError.
    """
    sources.require_secret(config)
    sources.require_redis(config)
    if ready_file is not None:
        check_writable(ready_file, "--ready-file", "ready_file")
    for url, rights in servers:
        report_redis(url, rights)


def report_redis(url: str, rights: Rights) -> None:
    """Say that Redis does not answer, is too old, or refuses what this process needs."""
    if why := why_silent(url):
        tell(f"{why}; starting anyway, Redis is used as soon as it answers")
    elif why := ask_why_unusable(url):
        tell(f"{why}; starting anyway, requests fail until another one is there")
    elif why := too_few_rights(url, rights):
        tell(f"{why}; starting anyway, Redis is used as far as it allows")


async def _run_router(config: RouterConfig, ready_file: Path | None) -> None:
    with without_gc():
        from router.server import Router

    logs.configure(config.router_id)
    stop = stop_event()
    running = Router(config)
    await running.start()
    tell(f"{config.router_id} listens on {running.http_url} and {running.grpc_address} (gRPC)")
    facts = {
        "id": config.router_id,
        "pid": os.getpid(),
        "http": running.http_url,
        "grpc": running.grpc_address,
    }
    try:
        write_ready(ready_file, facts)
        await stop.wait()
    finally:  # a file that cannot be written ends the router, and what it has taken in meanwhile is served
        await running.close()


async def _run_router_processes(config: RouterConfig, ready_file: Path | None) -> None:
    from router.processes.parent import RouterProcesses

    logs.configure(config.router_id)
    stop = stop_event()

    def changed() -> None:
        facts = {"id": config.router_id, "pid": os.getpid(), "http": running.http_url}
        if all(running.pids):
            try_to_write_ready(ready_file, {**facts, "grpc": running.grpc_address, "processes": running.pids})

    running = RouterProcesses(config, changed)
    stopped = asyncio.create_task(stop.wait())
    try:
        starting = asyncio.create_task(running.start())
        begins: list[asyncio.Future[Any]] = [starting, stopped]
        await asyncio.wait(begins, return_when=asyncio.FIRST_COMPLETED)
        if starting.done():
            starting.result()
            where = f"{running.http_url} and {running.grpc_address} (gRPC)"
            tell(f"{config.router_id} listens on {where} with {config.processes} processes")
            ends: list[asyncio.Future[Any]] = [stopped, running.failed]
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
    finally:
        await running.close()
        stopped.cancel()
    if running.failed.done():
        raise SystemExit(f"{config.router_id} failed: {running.failed.result()}")


def stop_event() -> asyncio.Event:
    """Set by Ctrl-C or SIGTERM."""
    event = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, event.set)
    return event


def write_ready(path: Path | None, facts: dict[str, Any]) -> None:
    if path is not None:
        safe_files.replace(path, json.dumps(facts).encode(), safe_files.SHARED)


def try_to_write_ready(path: Path | None, facts: dict[str, Any]) -> None:
    """As `write_ready`, for a process that others depend on by now: a full disk must not end it."""
    try:
        write_ready(path, facts)
    except OSError as error:
        tell(f"{path} cannot be written, and is missing or out of date: {error.strerror}")


def _command(role: Role) -> Callable[..., None]:
    @WORKER.add_to
    def run(config: ConfigFile = None, ready_file: ReadyFile = None, **flags: Any) -> None:
        from worker.rights import redis_rights

        resolved = sources.load(WorkerConfig, {**WORKER.values(WorkerConfig, flags), "role": role}, config)
        check_start(resolved, ready_file, redis_rights(resolved))
        import uvloop

        uvloop.run(_run_worker(resolved, ready_file))

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


async def _run_worker(config: WorkerConfig, ready_file: Path | None) -> None:
    try:
        await _serve_worker(config, ready_file)
    finally:
        end_surely()


async def _serve_worker(config: WorkerConfig, ready_file: Path | None) -> None:
    from baton.workers import start_worker

    logs.configure(config.worker_id)
    # The loop does not turn while a model is loaded, and nothing is lost by ending there and then.
    signal.signal(signal.SIGTERM, _end_at_once)
    worker = await start_worker(config)
    stop = stop_event()
    tell(f"{worker.worker_id} serves {config.role} on {worker.address}")
    facts: dict[str, Any] = {
        "id": worker.worker_id,
        "role": config.role,
        "pid": os.getpid(),
        "address": worker.address,
        "metrics": worker.metrics_address,
    }
    try:
        write_ready(ready_file, facts)
    except OSError:  # routers may have placed requests here
        await worker.stop()
        raise
    failed = asyncio.create_task(worker.wait_failed())
    reasons = [failed, asyncio.create_task(stop.wait()), asyncio.create_task(worker.wait_drain_wanted())]
    await asyncio.wait(reasons, return_when=asyncio.FIRST_COMPLETED)
    tell(f"{worker.worker_id} is leaving")
    await worker.stop()
    if failed.done():
        raise SystemExit(f"{worker.worker_id} failed: {failed.result()!r}")
    for reason in reasons:
        reason.cancel()
