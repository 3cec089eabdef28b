"""Single processes: `baton router`, `baton pools`, and what `baton prefill` and `baton decode` share with them.

Every setting of cluster/config/models.py can come from `--config FILE` (YAML), the environment (`BATON_…`, nested with
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

from baton.cli.output import say
from baton.cli.overload import (
    AdmissionSeconds,
    MaxRequests,
    MaxRequestsPerTenant,
    RequestsPerMinute,
    TokensPerMinute,
    TtftBatch,
    TtftHigh,
    TtftNormal,
)
from baton.local.state import check_writable
from cluster.config import sources
from cluster.config.models import LocalPrefill, MetricsAliases, RouterConfig, WorkerConfig
from cluster.redis.first_contact import why_silent
from cluster.telemetry import logs

ModelDir = Annotated[Path | None, typer.Option("--model", help="Hugging Face model directory.")]
ConfigFile = Annotated[
    Path | None, typer.Option("--config", envvar="BATON_CONFIG", help="YAML file with the same fields.")
]
RedisUrl = Annotated[str | None, typer.Option(help="redis://… or unix://… that the cluster shares.")]
RedisPasswordFile = Annotated[Path | None, typer.Option(help="File with Redis's password.")]
SecretFile = Annotated[Path | None, typer.Option(help="File with the deployment secret.")]
Namespace = Annotated[str | None, typer.Option(help="Prefix of this deployment's Redis keys.")]
Host = Annotated[str | None, typer.Option(help="Address to listen on. [dim]127.0.0.1[/dim]")]
TlsCert = Annotated[Path | None, typer.Option(help="This process's certificate (PEM).")]
TlsKey = Annotated[Path | None, typer.Option(help="Its key.")]
TlsCa = Annotated[Path | None, typer.Option(help="Authority of the cluster's certificates.")]
OtlpEndpoint = Annotated[str | None, typer.Option(help="Collector of traces, OTLP over HTTP.")]
MetricsAliasesChoice = Annotated[
    MetricsAliases | None, typer.Option(help="vllm: vLLM's metric names beside Baton's.")
]
DrainSeconds = Annotated[float | None, typer.Option(help="To finish requests in before it leaves.")]
ReadyFile = Annotated[
    Path | None,
    typer.Option(envvar="BATON_READY_FILE", help="Write addresses here (JSON) once serving."),
]


def router(
    model: ModelDir = None,
    config: ConfigFile = None,
    redis_url: RedisUrl = None,
    redis_password_file: RedisPasswordFile = None,
    namespace: Namespace = None,
    secret_file: SecretFile = None,
    router_id: Annotated[str | None, typer.Option(help="Default: a random one.")] = None,
    host: Host = None,
    http_port: Annotated[int | None, typer.Option(help="OpenAI HTTP port; 0 = any.")] = None,
    grpc_port: Annotated[int | None, typer.Option(help="gRPC port; 0 = any.")] = None,
    served_model_name: Annotated[str | None, typer.Option(help="Name clients use.")] = None,
    local_prefill: Annotated[
        LocalPrefill | None, typer.Option(help="May decode workers prefill by themselves?")
    ] = None,
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
    ui: Annotated[
        bool | None, typer.Option(help="The page at /ui. [dim]on[/dim]", show_default=False)
    ] = None,
    ttft_target_seconds_high: TtftHigh = None,
    ttft_target_seconds_normal: TtftNormal = None,
    ttft_target_seconds_batch: TtftBatch = None,
    admission_seconds: AdmissionSeconds = None,
    max_concurrent_requests: MaxRequests = None,
    max_concurrent_requests_per_tenant: MaxRequestsPerTenant = None,
    requests_per_minute_per_tenant: RequestsPerMinute = None,
    tokens_per_minute_per_tenant: TokensPerMinute = None,
    otlp_endpoint: OtlpEndpoint = None,
    metrics_aliases: MetricsAliasesChoice = None,
    drain_seconds: DrainSeconds = None,
    ready_file: ReadyFile = None,
) -> None:
    """Run one router: OpenAI HTTP and gRPC in front, placement, and the life of every request.

    Whatever has no flag here (request size and time limits, weights of choices and prompts, …) is a setting of the
    YAML file that --config names, or an environment variable BATON_…; docs/security.md lists the limits.
    """
    flags = given(**locals())  # every flag is the setting of its name, but for two
    flags.pop("ready_file", None)
    flags.pop("config", None)
    resolved = sources.load(RouterConfig, flags, config)
    check_start(resolved, ready_file)
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


def pools(
    config: Annotated[Path, typer.Option(help="JSON: {prefill: [worker…], decode: [worker…]}.")],
    address: Annotated[str, typer.Option(help="Ray cluster, host:port.")] = "auto",
    deployed: Annotated[
        bool, typer.Option("--deployed", help="They run there already: only stay, and end them in the end.")
    ] = False,
    ready_file: ReadyFile = None,
) -> None:
    """Deploy both pools on a Ray cluster as one Serve application, and stay until told to stop."""
    from baton.cli.pools import run_pools

    run_pools(config, address, ready_file, deployed)


def given(**flags: Any) -> dict[str, Any]:
    """Only what the command line named: the rest comes from file and environment."""
    return {name: value for name, value in flags.items() if value is not None}


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
