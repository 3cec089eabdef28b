"""Single processes: `baton router`, `baton prefill`, `baton decode`, `baton pools`.

Every setting of cluster/config.py can come from `--config FILE` (YAML), the environment (`BATON_…`, nested with
`__`), or the flags here, the later winning.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
from pathlib import Path
from typing import Annotated, Any

import typer
import uvloop

from baton.commands.output import say
from cluster import settings
from cluster.config import Role, RouterConfig, WorkerConfig
from cluster.telemetry import logs

ModelDir = Annotated[Path | None, typer.Option("--model", help="Hugging Face model directory.")]
ConfigFile = Annotated[Path | None, typer.Option("--config", help="YAML file with the same fields.")]
RedisUrl = Annotated[str | None, typer.Option(help="redis://… or unix://… that the cluster shares.")]
Namespace = Annotated[str | None, typer.Option(help="Prefix of this deployment's Redis keys.")]
Host = Annotated[str | None, typer.Option(help="Address to listen on. [dim]127.0.0.1[/dim]")]
TlsCert = Annotated[Path | None, typer.Option(help="This process's certificate (PEM).")]
TlsKey = Annotated[Path | None, typer.Option(help="Its key.")]
TlsCa = Annotated[Path | None, typer.Option(help="Authority of the cluster's certificates.")]
ReadyFile = Annotated[Path | None, typer.Option(help="Write addresses here (JSON) once serving.")]


def router(
    model: ModelDir = None,
    config: ConfigFile = None,
    redis_url: RedisUrl = None,
    namespace: Namespace = None,
    host: Host = None,
    http_port: Annotated[int | None, typer.Option(help="OpenAI HTTP port; 0 = any.")] = None,
    grpc_port: Annotated[int | None, typer.Option(help="gRPC port; 0 = any.")] = None,
    served_model_name: Annotated[str | None, typer.Option(help="Name clients use.")] = None,
    api_keys_file: Annotated[
        Path | None, typer.Option(help="API keys (YAML or JSON); without it everyone may ask.")
    ] = None,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
    tls_ca: TlsCa = None,
    tls_client_ca: Annotated[
        Path | None, typer.Option(help="Authority whose certificates clients must show.")
    ] = None,
    share_prefixes_across_tenants: Annotated[
        bool | None,
        typer.Option("--share-prefixes-across-tenants", help="Tenants hit each other's cached prefixes."),
    ] = None,
    ready_file: ReadyFile = None,
) -> None:
    """Run one router: OpenAI HTTP and gRPC in front, placement, and the life of every request."""
    flags = _given(
        model=model,
        redis_url=redis_url,
        namespace=namespace,
        host=host,
        http_port=http_port,
        grpc_port=grpc_port,
        served_model_name=served_model_name,
        api_keys_file=api_keys_file,
        tls_cert=tls_cert,
        tls_key=tls_key,
        tls_ca=tls_ca,
        tls_client_ca=tls_client_ca,
        share_prefixes_across_tenants=share_prefixes_across_tenants,
    )
    uvloop.run(_run_router(settings.load(RouterConfig, flags, config), ready_file))


def prefill(
    model: ModelDir = None,
    config: ConfigFile = None,
    redis_url: RedisUrl = None,
    namespace: Namespace = None,
    host: Host = None,
    port: Annotated[int | None, typer.Option(help="gRPC port; 0 = any.")] = None,
    dtype: Annotated[str | None, typer.Option(help="auto | float32 | bfloat16")] = None,
    tensor_parallel: Annotated[int | None, typer.Option(help="Ranks of this worker.")] = None,
    threads: Annotated[int | None, typer.Option(help="CPU threads of one rank.")] = None,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
    tls_ca: TlsCa = None,
    ready_file: ReadyFile = None,
) -> None:
    """Run one prefill worker in the foreground."""
    engine = _given(model=model, dtype=dtype, tensor_parallel=tensor_parallel, threads=threads)
    flags = _given(redis_url=redis_url, namespace=namespace, host=host, port=port)
    flags |= _given(tls_cert=tls_cert, tls_key=tls_key, tls_ca=tls_ca)
    _worker("prefill", flags, engine, config, ready_file)


def decode(
    model: ModelDir = None,
    config: ConfigFile = None,
    redis_url: RedisUrl = None,
    namespace: Namespace = None,
    host: Host = None,
    port: Annotated[int | None, typer.Option(help="gRPC port; 0 = any.")] = None,
    dtype: Annotated[str | None, typer.Option(help="auto | float32 | bfloat16")] = None,
    tensor_parallel: Annotated[int | None, typer.Option(help="Ranks of this worker.")] = None,
    threads: Annotated[int | None, typer.Option(help="CPU threads of one rank.")] = None,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
    tls_ca: TlsCa = None,
    ready_file: ReadyFile = None,
) -> None:
    """Run one decode worker in the foreground."""
    engine = _given(model=model, dtype=dtype, tensor_parallel=tensor_parallel, threads=threads)
    flags = _given(redis_url=redis_url, namespace=namespace, host=host, port=port)
    flags |= _given(tls_cert=tls_cert, tls_key=tls_key, tls_ca=tls_ca)
    _worker("decode", flags, engine, config, ready_file)


def pools(
    config: Annotated[Path, typer.Option(help="JSON: {prefill: [worker…], decode: [worker…]}.")],
    address: Annotated[str, typer.Option(help="Ray cluster, host:port.")] = "auto",
    ready_file: ReadyFile = None,
) -> None:
    """Deploy both pools on a Ray cluster as one Serve application, and stay until told to stop."""
    from baton.commands.pools import run_pools

    run_pools(config, address, ready_file)


def _worker(
    role: Role, flags: dict[str, Any], engine: dict[str, Any], config: Path | None, ready: Path | None
) -> None:
    flags["role"] = role
    if engine:
        flags["engine"] = engine
    uvloop.run(_run_worker(settings.load(WorkerConfig, flags, config), ready))


def _given(**flags: Any) -> dict[str, Any]:
    """Only what the command line named: the rest comes from file and environment."""
    return {name: value for name, value in flags.items() if value is not None}


async def _run_worker(config: WorkerConfig, ready_file: Path | None) -> None:
    from baton.workers import start_worker

    logs.configure(config.worker_id)
    stop = stop_event()
    worker = await start_worker(config)
    say(f"{worker.worker_id} serves {config.role} on {worker.address}")
    write_ready(
        ready_file,
        {
            "id": worker.worker_id,
            "role": config.role,
            "pid": os.getpid(),
            "address": worker.address,
            "metrics": worker.metrics_address,
        },
    )
    failed = asyncio.create_task(worker.wait_failed())
    stopped = asyncio.create_task(stop.wait())
    await asyncio.wait([failed, stopped], return_when=asyncio.FIRST_COMPLETED)
    await worker.stop()
    if failed.done():
        raise SystemExit(f"{worker.worker_id} failed: {failed.result()!r}")
    failed.cancel()


async def _run_router(config: RouterConfig, ready_file: Path | None) -> None:
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
