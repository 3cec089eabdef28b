"""What `baton up` was asked for, and the workers' configurations that follow from it."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import psutil

from cluster.config import EngineConfig, LocalPrefill, Role, RouterConfig, TransferConfig, WorkerConfig
from cluster.errors import ConfigError

# Of the memory that is free at the start, the share all KV pools together may take when none is named, and the
# most one pool takes: a small model gains nothing from more.
KV_SHARE_OF_FREE = 0.3
KV_POOL_MAX_BYTES = 2 << 30
# What a decode worker computes again by itself when it preempts: beyond it a prefill worker, which has most of it in
# its cache, is quicker, and the running batch is not held up.
RECOMPUTE_LIMIT_TOKENS = 256


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
    redis_url: str = ""
    namespace: str = ""
    state_file: Path | None = None
    transfer: TransferConfig = TransferConfig()

    def __post_init__(self) -> None:
        if not (self.model / "config.json").is_file():
            raise ConfigError(f"--model {self.model}: no config.json there", field="model")
        for name in ("routers", "decode", "prefill_tp", "decode_tp", "threads_per_worker"):
            if getattr(self, name) < 1:
                raise ConfigError(f"--{name.replace('_', '-')} must be at least 1", field=name)
        if not self.aggregated and self.prefill < 1 and self.local_prefill == "never":
            raise ConfigError(
                "--prefill 0 leaves nobody to prefill; allow --local-prefill fallback or --aggregated",
                field="prefill",
            )

    @property
    def prefill_workers(self) -> int:
        return 0 if self.aggregated else self.prefill

    @property
    def kv_memory_bytes(self) -> int:
        """The KV pool of one rank."""
        if self.kv_memory:
            return self.kv_memory
        ranks = self.prefill_workers * self.prefill_tp + self.decode * self.decode_tp
        free = psutil.virtual_memory().available
        return min(KV_POOL_MAX_BYTES, int(free * KV_SHARE_OF_FREE) // ranks)

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
