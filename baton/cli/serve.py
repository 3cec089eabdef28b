"""`baton router`, `baton pools`, and what the other commands of single processes share with them."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from pathlib import Path
from typing import Annotated, Any

import typer

from baton.cli.flags import Flags
from baton.cli.output import say
from baton.local.state import check_writable
from baton.processes.uncollected import uncollected
from cluster.config import sources
from cluster.config.router import RouterConfig
from cluster.config.worker import WorkerConfig
from cluster.redis.first_contact import why_silent
from cluster.telemetry import logs

ConfigFile = Annotated[
    Path | None, typer.Option("--config", envvar="BATON_CONFIG", help="YAML file with these settings.")
]
ReadyFile = Annotated[
    Path | None,
    typer.Option(envvar="BATON_READY_FILE", help="Write addresses here (JSON) once serving."),
]


ROUTER = Flags(RouterConfig)


@ROUTER.add_to
def router(config: ConfigFile = None, ready_file: ReadyFile = None, **flags: Any) -> None:
    """Run one router: OpenAI HTTP and gRPC, placement, and the dispatch of every request.

    Each setting is a flag here, an environment variable (BATON_HTTP_PORT) and a field of the YAML file that --config
    names; the flag wins over the variable, the variable over the file. docs/settings.md lists them all.
    """
    resolved = sources.load(RouterConfig, ROUTER.values(RouterConfig, flags), config)
    check_start(resolved, ready_file)
    import uvloop

    uvloop.run(_run_router(resolved, ready_file))


def check_start(config: RouterConfig | WorkerConfig, ready_file: Path | None) -> None:
    """Check what can be checked before a model is loaded.

    An unreachable Redis is only reported, because it may start later than this process. Raises ConfigError.
    """
    sources.require_secret(config)
    sources.require_redis(config)
    if ready_file is not None:
        check_writable(ready_file, "--ready-file", "ready_file")
    if why := why_silent(config.redis_url):
        say(f"{why}; starting anyway, Redis is used as soon as it answers")


async def _run_router(config: RouterConfig, ready_file: Path | None) -> None:
    with uncollected():
        from router.server import Router

    logs.configure(config.router_id)
    stop = stop_event()
    running = Router(config)
    await running.start()
    say(f"{config.router_id} listens on {running.http_url} and {running.grpc_address} (gRPC)")
    write_ready(
        ready_file,
        {"id": config.router_id, "pid": os.getpid(), "http": running.http_url, "grpc": running.grpc_address},
    )
    await stop.wait()
    await running.close()


def stop_event() -> asyncio.Event:
    """Set by Ctrl-C or SIGTERM."""
    event = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, event.set)
    return event


def write_ready(path: Path | None, facts: dict[str, Any]) -> None:
    if path is not None:
        scratch = path.with_suffix(".part")
        scratch.write_text(json.dumps(facts))
        scratch.replace(path)
