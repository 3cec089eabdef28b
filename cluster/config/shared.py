"""Settings that several kinds of process share."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field

from cluster.config.base import Frozen, no_flag

MetricsAliases = Literal["none", "vllm"]


class TlsFields(Frozen):
    """This process's TLS identity and the authority it accepts (PEM files, read again when they change)."""

    panel = "TLS"

    tls_cert: Path | None = Field(None, description="certificate chain of this process; none = plain text")
    tls_key: Path | None = Field(None, description="key of tls_cert")
    tls_ca: Path | None = Field(
        None, description="authority of the cluster's own certificates; it must sign nothing else"
    )


class ClusterFields(Frozen):
    """The cluster this process belongs to."""

    panel = "Cluster"

    redis_url: str = Field(
        "",
        description="redis://…, rediss://… or unix://…; redis+sentinel://host:port,…/master or "
        "redis+cluster://host:port,… (rediss+… for TLS); one Redis for the cluster, the user may differ by component",
        repr=False,
    )
    redis_password: str = no_flag("", description="password for a redis_url that contains none", repr=False)
    redis_password_file: Path | None = Field(
        None, description="file that holds Redis's password (a mounted Secret)"
    )
    namespace: str = Field("baton", description="prefix of every Redis key of this deployment")


class IndexFields(Frozen):
    panel = "Cluster"

    index_url: str = Field(
        "",
        description="a Redis of its own for the prefix index, in the forms of redis_url, the same for all routers and "
        "workers; none = the index is in redis_url's",
        repr=False,
    )
    index_password: str = no_flag("", description="password for an index_url that contains none", repr=False)
    index_password_file: Path | None = Field(
        None, description="file that holds the password of the index's Redis (a mounted Secret)"
    )


class SecretFields(Frozen):
    panel = "Cluster"

    secret: str = no_flag(
        "",
        description="deployment secret that keys the block hashes and the resume tickets; required, and the same in all "
        "routers and workers",
        repr=False,
    )
    secret_file: Path | None = Field(
        None, description="file that holds the deployment secret (a mounted Secret)"
    )


class TelemetryFields(Frozen):
    """Metrics and traces of this process (docs/observability.md)."""

    panel = "Telemetry"

    metrics_aliases: MetricsAliases = Field("none", description="vllm: vLLM's metric names beside Baton's")
    otlp_endpoint: str = Field(
        "",
        pattern=r"^(https?://.+)?$",
        description="collector of traces, OTLP over HTTP, such as http://collector:4318; none = "
        "OTEL_EXPORTER_OTLP_ENDPOINT, or no traces",
    )
    trace_sample_ratio: float | None = Field(
        None,
        ge=0,
        le=1,
        description="share of requests to trace where the client does not decide; none = OTEL_…, or all",
    )
