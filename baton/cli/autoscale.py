"""`baton autoscale`: sizes both pools of an embedded deployment on Kubernetes."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry, start_http_server
from pydantic import Field

from baton.autoscaler.config import AutoscalingConfig
from baton.cli.flags import Flags
from baton.cli.output import say
from baton.cli.serve import ConfigFile, ReadyFile, report_redis, write_ready
from cluster.config import sources
from cluster.config.base import Frozen
from cluster.config.shared import ClusterFields
from cluster.errors import ConfigError
from cluster.telemetry import logs


class StatefulSetNames(Frozen):
    panel = "Kubernetes"

    prefill: str = Field("baton-prefill", description="StatefulSet of the prefill workers")
    decode: str = Field("baton-decode", description="StatefulSet of the decode workers")


class AutoscaleConfig(AutoscalingConfig, ClusterFields):
    """The policy, the cluster whose load it reads, and the StatefulSets it sizes."""

    panel = "Kubernetes"

    host: str = Field("127.0.0.1", description="address of /metrics")
    metrics_port: int = Field(0, ge=0, le=65535, description="/metrics; 0 = any")
    kubeconfig: Path | None = Field(None, description="default: the pod's service account")
    kubernetes_namespace: str = Field("", description="of the StatefulSets; default: the pod's own")
    stateful_sets: StatefulSetNames = StatefulSetNames()


AUTOSCALE = Flags(AutoscaleConfig)


@AUTOSCALE.add_to
def autoscale(config: ConfigFile = None, ready_file: ReadyFile = None, **flags: Any) -> None:
    """Size both pools on Kubernetes: patches the scale of two StatefulSets, within one budget of GPUs."""
    _run(sources.load(AutoscaleConfig, AUTOSCALE.values(AutoscaleConfig, flags), config), ready_file)


def _run(config: AutoscaleConfig, ready_file: Path | None) -> None:
    from baton.autoscaler.autoscaler import Autoscaler
    from baton.autoscaler.platforms.kubernetes import StatefulSets, connect, own_namespace
    from baton.autoscaler.rights import rights

    if not config.redis_url:
        raise ConfigError("--redis-url is missing: workers publish their load there", field="redis_url")
    report_redis(config.redis_url, rights(config.namespace))
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
