"""`baton autoscale`: sizes both pools of an embedded deployment on Kubernetes."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path
from typing import Annotated

import typer
from prometheus_client import CollectorRegistry, start_http_server
from pydantic import Field

from baton.autoscaler.config import AutoscalingConfig
from baton.cli.output import say
from baton.cli.serve import (
    ConfigFile,
    Host,
    Namespace,
    ReadyFile,
    RedisPasswordFile,
    RedisUrl,
    given,
    write_ready,
)
from cluster.config import sources
from cluster.config.models import ClusterFields, Frozen
from cluster.errors import ConfigError
from cluster.telemetry import logs


class StatefulSetNames(Frozen):
    prefill: str = "baton-prefill"
    decode: str = "baton-decode"


class AutoscaleConfig(AutoscalingConfig, ClusterFields):
    """`baton autoscale`: the policy, whom it listens to, and what it sizes."""

    host: str = Field("127.0.0.1", description="address of /metrics")
    metrics_port: int = Field(0, ge=0, le=65535, description="/metrics; 0 = any")
    kubeconfig: Path | None = Field(None, description="default: the pod's service account")
    kubernetes_namespace: str = Field("", description="of the StatefulSets; default: the pod's own")
    stateful_sets: StatefulSetNames = StatefulSetNames()


def autoscale(
    config: ConfigFile = None,
    redis_url: RedisUrl = None,
    redis_password_file: RedisPasswordFile = None,
    namespace: Namespace = None,
    kubeconfig: Annotated[
        Path | None, typer.Option(help="How to reach Kubernetes; default: the pod's service account.")
    ] = None,
    kubernetes_namespace: Annotated[
        str | None, typer.Option(help="Namespace of the StatefulSets; default: the pod's own.")
    ] = None,
    gpu_budget: Annotated[int | None, typer.Option(help="GPUs that both pools may take together.")] = None,
    ttft_objective: Annotated[float | None, typer.Option(help="Seconds to the first token.")] = None,
    itl_objective: Annotated[float | None, typer.Option(help="Seconds between tokens.")] = None,
    host: Host = None,
    metrics_port: Annotated[int | None, typer.Option(help="/metrics; 0 = any.")] = None,
    ready_file: ReadyFile = None,
) -> None:
    """Size both pools on Kubernetes: patches the scale of two StatefulSets, within one budget of GPUs."""
    flags = given(
        redis_url=redis_url,
        redis_password_file=redis_password_file,
        namespace=namespace,
        kubeconfig=kubeconfig,
        kubernetes_namespace=kubernetes_namespace,
        gpu_budget=gpu_budget,
        ttft_objective_seconds=ttft_objective,
        itl_objective_seconds=itl_objective,
        host=host,
        metrics_port=metrics_port,
    )
    _run(sources.load(AutoscaleConfig, flags, config), ready_file)


def _run(config: AutoscaleConfig, ready_file: Path | None) -> None:
    from baton.autoscaler.autoscaler import Autoscaler
    from baton.autoscaler.platforms.kubernetes import StatefulSets, connect, own_namespace

    if not config.redis_url:
        raise ConfigError("--redis-url is missing: workers publish their load there", field="redis_url")
    logs.configure("autoscaler")
    stop = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.set())
    where = config.kubernetes_namespace or own_namespace()
    names = config.stateful_sets
    platform = StatefulSets(
        connect(config.kubeconfig), where, {"prefill": names.prefill, "decode": names.decode}
    )
    registry = CollectorRegistry()
    try:
        server, thread = start_http_server(config.metrics_port, config.host, registry)
    except OSError as error:
        raise ConfigError(f"--metrics-port {config.metrics_port}: {error}", field="metrics_port") from error
    say(f"autoscaler sizes {names.prefill} and {names.decode} in {where}, {config.gpu_budget} GPUs")
    write_ready(ready_file, {"pid": os.getpid(), "metrics": f"{config.host}:{server.server_port}"})
    try:
        Autoscaler(config, config.redis_url, config.namespace, platform, registry).run(stop)
    finally:
        platform.close()
        server.shutdown()
        server.server_close()
        thread.join(5.0)
