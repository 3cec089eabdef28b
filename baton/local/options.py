"""What `baton up` was asked for, and the workers' configurations that follow from it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from pydantic import ValidationError

from baton.autoscaler.config import ServeAutoscalingConfig
from baton.local.local_tls import LocalTls
from cluster.config import sources
from cluster.config.models import (
    EngineConfig,
    LocalPrefill,
    MetricsAliases,
    Role,
    RouterConfig,
    TransferConfig,
    WorkerConfig,
)
from cluster.errors import ConfigError
from cluster.process.memory import available_bytes
from cluster.redis.first_contact import check_url

# Of the memory that is free at the start, the share all KV pools together may take when none is named, and the
# most one pool takes: a small model gains nothing from more.
KV_SHARE_OF_FREE = 0.3
KV_POOL_MAX_BYTES = 2 << 30
# What a decode worker computes again by itself when it preempts: beyond it a prefill worker, which has most of it in
# its cache, is quicker, and the running batch is not held up.
RECOMPUTE_LIMIT_TOKENS = 256
# Where a process's setting has another name than the flag.
_SETTINGS_OF_FLAGS = {"kv_memory_bytes": "kv_memory", "threads": "threads_per_worker"}
ROLES: tuple[Role, ...] = ("prefill", "decode")
ROUTER_DRAIN_SECONDS = 5.0  # who presses Ctrl-C does not want to wait for every stream


@dataclass(frozen=True)
class UpOptions:
    model: Path
    routers: int = 1
    prefill: int = 1
    decode: int = 1
    prefill_tp: int = 1
    decode_tp: int = 1
    aggregated: bool = False
    local_prefill: LocalPrefill = "auto"
    pool: Literal["ray", "process"] = "ray"
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    max_model_len: int = 0
    kv_memory: int = 0
    page_size: int = 16
    max_batch_tokens: int = 0
    chunked_prefill: bool = True
    served_model_name: str = ""
    threads_per_worker: int = 1
    http_port: int = 8000
    grpc_port: int = 50051
    autoscaling: Path | None = None
    redis_url: str = ""
    limits: Mapping[str, float] = field(default_factory=dict)  # the routers' settings of these names
    batch_aging_seconds: float | None = None
    api_keys_file: Path | None = None
    share_prefixes_across_tenants: bool = False
    certs: Path | None = None
    require_client_certs: bool = False
    namespace: str = ""
    state_file: Path | None = None
    transfer: TransferConfig = TransferConfig()
    otlp_endpoint: str = ""
    trace_sample_ratio: float | None = None
    metrics_aliases: MetricsAliases = "none"

    def __post_init__(self) -> None:
        if not (self.model / "config.json").is_file():
            raise ConfigError(f"--model {self.model}: no config.json there", field="model")
        for name in ("routers", "decode", "prefill_tp", "decode_tp", "threads_per_worker"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{_flag(name)} must be at least 1", field=name)
        for name in ("prefill", "kv_memory"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{_flag(name)} must be at least 0", field=name)
        if self.batch_aging_seconds is not None and self.batch_aging_seconds <= 0:
            raise ConfigError("--batch-aging-seconds must be above 0", field="batch_aging_seconds")
        self._check_settings()
        self._check_kv_memory()
        if self.redis_url:
            check_url(self.redis_url)
        if self.autoscaling is not None and (self.pool != "ray" or self.aggregated):
            raise ConfigError(
                "--autoscaling sizes two pools that Ray runs: use --pool ray, without --aggregated",
                field="autoscaling",
            )
        if self.require_client_certs and self.certs is None:
            raise ConfigError("--require-client-certs needs --certs", field="certs")
        if not self.aggregated and self.prefill < 1 and self.local_prefill == "never":
            raise ConfigError(
                "--prefill 0 leaves nobody to prefill; allow --local-prefill fallback or --aggregated",
                field="prefill",
            )

    def _check_settings(self) -> None:
        """By the rules of the processes that will run with them, before any is started."""
        try:
            for index in {0, self.routers - 1}:  # the last one has the highest ports
                self.router_config(index, "", "", "")
            for role in ROLES:
                self.worker_config(role, "", "", "")
        except ValidationError as error:
            problem = error.errors(include_input=False)[0]
            name = str(problem["loc"][-1]) if problem["loc"] else ""
            name = _SETTINGS_OF_FLAGS.get(name, name)
            raise ConfigError(f"{_flag(name)}: {problem['msg']}", field=name) from None

    def _check_kv_memory(self) -> None:
        """Raise ConfigError if the KV pools do not fit the free memory.

        The kernel commits memory on first use, so an oversized pool is allocated without an error and its worker is
        killed later, under load.
        """
        ranks = self._ranks
        if self.kv_memory * ranks > (free := available_bytes()):
            raise ConfigError(
                f"--kv-memory {_in_gib(self.kv_memory)} for each of {ranks} ranks is more than the {_in_gib(free)} of "
                f"memory that are free: give less than {_in_gib(free // ranks)}, or omit it for a share that fits",
                field="kv_memory",
            )

    @property
    def _ranks(self) -> int:
        return self.prefill_workers * self.prefill_tp + self.decode * self.decode_tp

    @property
    def tls(self) -> LocalTls:
        return LocalTls(self.certs, self.require_client_certs)

    @property
    def telemetry(self) -> dict[str, Any]:
        """Of every process."""
        return {
            "otlp_endpoint": self.otlp_endpoint,
            "trace_sample_ratio": self.trace_sample_ratio,
            "metrics_aliases": self.metrics_aliases,
        }

    @property
    def prefill_workers(self) -> int:
        return 0 if self.aggregated else self.prefill

    @property
    def policy(self) -> ServeAutoscalingConfig | None:
        """Raises ConfigError."""
        return (
            None if self.autoscaling is None else sources.load(ServeAutoscalingConfig, {}, self.autoscaling)
        )

    @property
    def ray_cpus(self) -> int:
        """A logical CPU for each rank that may ever run."""
        prefill, decode = self.prefill_workers, self.decode
        if (policy := self.policy) is not None:
            prefill, decode = policy.prefill.max_replicas, policy.decode.max_replicas
        return prefill * self.prefill_tp + decode * self.decode_tp

    @property
    def kv_memory_bytes(self) -> int:
        """The KV pool of one rank."""
        if self.kv_memory:
            return self.kv_memory
        return min(KV_POOL_MAX_BYTES, int(available_bytes() * KV_SHARE_OF_FREE) // self._ranks)

    def worker_config(self, role: Role, redis_url: str, namespace: str, secret: str) -> WorkerConfig:
        tensor_parallel = self.prefill_tp if role == "prefill" else self.decode_tp
        # A prefill step may be long: nobody waits for a token in it. A decode worker that prefills must not
        # hold its running batch up for longer than a chunk.
        default_budget = 2048 if role == "prefill" else 512
        return WorkerConfig(
            role=role,
            redis_url=redis_url,
            namespace=namespace,
            secret=secret,
            transfer=self.transfer,
            **({"batch_aging_seconds": self.batch_aging_seconds} if self.batch_aging_seconds else {}),
            **self.tls.worker(),
            **self.telemetry,
            engine=EngineConfig(
                model=self.model.absolute(),
                dtype=self.dtype,
                max_model_len=self.max_model_len,
                kv_memory_bytes=self.kv_memory_bytes,
                page_size=self.page_size,
                max_batch_tokens=self.max_batch_tokens or default_budget,
                chunked_prefill=self.chunked_prefill,
                tensor_parallel=tensor_parallel,
                threads=self.threads_per_worker,
                recompute_limit_tokens=RECOMPUTE_LIMIT_TOKENS if self._gives_back(role) else 0,
            ),
        )

    def _gives_back(self, role: Role) -> bool:
        return role == "decode" and self.prefill_workers > 0

    def router_config(self, index: int, redis_url: str, namespace: str, secret: str) -> RouterConfig:
        return RouterConfig(
            http_port=self.http_port + index if self.http_port else 0,
            grpc_port=self.grpc_port + index if self.grpc_port else 0,
            redis_url=redis_url,
            namespace=namespace,
            secret=secret,
            model=self.model.absolute(),
            served_model_name=self.served_model_name or self.model.absolute().name,
            max_model_len=self.max_model_len,
            page_size=self.page_size,
            local_prefill=self.local_prefill,
            aggregated=self.aggregated,
            drain_seconds=ROUTER_DRAIN_SECONDS,
            **self.tls.router(),
            **self.telemetry,
            share_prefixes_across_tenants=self.share_prefixes_across_tenants,
            api_keys_file=self.api_keys_file.absolute() if self.api_keys_file else None,
            **self.limits,
        )

    def worker_environment(self) -> dict[str, str]:
        """Passive waiting: busy-waiting workers that share cores ran 40 times slower (measured)."""
        return {
            "OMP_NUM_THREADS": str(self.threads_per_worker),
            "MKL_NUM_THREADS": str(self.threads_per_worker),
            "OMP_WAIT_POLICY": "PASSIVE",
            "TOKENIZERS_PARALLELISM": "false",
            "PYTHONPATH": os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH", "")])),
        }


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _in_gib(size: int) -> str:
    return f"{size / 2**30:.3g} GiB"
