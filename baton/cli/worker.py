"""`baton prefill` and `baton decode`: one worker in the foreground."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
import uvloop

from baton.cli.output import say
from baton.cli.serve import (
    ConfigFile,
    DrainSeconds,
    Host,
    MetricsAliasesChoice,
    ModelDir,
    Namespace,
    OtlpEndpoint,
    ReadyFile,
    RedisPasswordFile,
    RedisUrl,
    SecretFile,
    TlsCa,
    TlsCert,
    TlsKey,
    check_start,
    given,
    stop_event,
    write_ready,
)
from baton.cli.sizes import parse_bytes
from baton.processes.force_exit import end_surely
from cluster.config import sources
from cluster.config.models import Role, WorkerConfig
from cluster.telemetry import logs

_ENGINE = (
    "model",
    "dtype",
    "device",
    "tensor_parallel",
    "threads",
    "page_size",
    "max_model_len",
    "kv_memory_bytes",
)
_TOPOLOGY = ("node_name", "rack", "zone")
_TRANSFER = ("transport", "require_transport", "port_range")


def _command(role: Role) -> Callable[..., None]:
    """Both roles take the same flags: a Typer command is its signature."""

    def run(
        model: ModelDir = None,
        config: ConfigFile = None,
        worker_id: Annotated[str | None, typer.Option(help="Unique; default: role and a random end.")] = None,
        redis_url: RedisUrl = None,
        redis_password_file: RedisPasswordFile = None,
        namespace: Namespace = None,
        secret_file: SecretFile = None,
        host: Host = None,
        advertise_host: Annotated[
            str | None, typer.Option(help="Address others reach it at, e.g. the pod's IP.")
        ] = None,
        port: Annotated[int | None, typer.Option(help="gRPC port; 0 = any.")] = None,
        metrics_port: Annotated[int | None, typer.Option(help="/metrics, /ready, /live; 0 = any.")] = None,
        node_name: Annotated[
            str | None, typer.Option(envvar="NODE_NAME", help="Kubernetes node, to read its labels.")
        ] = None,
        rack: Annotated[str | None, typer.Option(help="Rack of this host, where no label says it.")] = None,
        zone: Annotated[str | None, typer.Option(help="Zone of this host, where no label says it.")] = None,
        dtype: Annotated[str | None, typer.Option(help="auto | float32 | bfloat16")] = None,
        device: Annotated[str | None, typer.Option(help="auto | cpu | cuda | cuda:N")] = None,
        tensor_parallel: Annotated[int | None, typer.Option(help="Ranks of this worker.")] = None,
        threads: Annotated[int | None, typer.Option(help="CPU threads of one rank.")] = None,
        kv_memory: Annotated[str | None, typer.Option(help="KV pool of one rank, e.g. 40GiB.")] = None,
        page_size: Annotated[int | None, typer.Option(help="Tokens in a KV block.")] = None,
        max_model_len: Annotated[int | None, typer.Option(help="Longest context; 0 = the model's.")] = None,
        transport: Annotated[
            Literal["auto", "nixl", "grpc"] | None, typer.Option(help="How KV moves between workers.")
        ] = None,
        require_transport: Annotated[str | None, typer.Option(help="Refuse any other transport.")] = None,
        port_range: Annotated[
            str | None, typer.Option(help="Ports for NIXL over TCP, e.g. 41000-41063.")
        ] = None,
        tls_cert: TlsCert = None,
        tls_key: TlsKey = None,
        tls_ca: TlsCa = None,
        otlp_endpoint: OtlpEndpoint = None,
        metrics_aliases: MetricsAliasesChoice = None,
        drain_seconds: DrainSeconds = None,
        ready_file: ReadyFile = None,
    ) -> None:
        flags = _nested(given(**{**locals(), "role": role, "config": None, "ready_file": None}))
        resolved = sources.load(WorkerConfig, flags, config)
        check_start(resolved, ready_file)
        uvloop.run(_run(resolved, ready_file))

    run.__doc__ = f"Run one {role} worker in the foreground."
    return run


prefill = _command("prefill")
decode = _command("decode")


def _nested(flags: dict[str, Any]) -> dict[str, Any]:
    """As WorkerConfig has them: the engine's and the transfer's flags lie one level deeper."""
    if "kv_memory" in flags:
        flags["kv_memory_bytes"] = parse_bytes(flags.pop("kv_memory"), "kv_memory")
    for part, names in (("engine", _ENGINE), ("transfer", _TRANSFER), ("topology", _TOPOLOGY)):
        inside = {name: flags.pop(name) for name in names if name in flags}
        if inside:
            flags[part] = inside
    return flags


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
