"""Settings of prefill and decode workers.

`"auto"` values are resolved once, by the process that owns them, into a new object.
"""

from __future__ import annotations

import secrets
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field, SerializerFunctionWrapHandler, model_serializer, model_validator

from cluster.config import adapters, speculation
from cluster.config.base import Bytes, Count, Frozen, ProcessName, Seconds, no_flag
from cluster.config.shared import ClusterFields, IndexFields, SecretFields, TelemetryFields, TlsFields
from cluster.config.speculation import DraftSource

Role = Literal["prefill", "decode"]
ROLES: tuple[Role, ...] = ("prefill", "decode")


class EngineConfig(Frozen):
    """How one engine runs its model."""

    panel = "Engine"

    model: Path = Field(description="Hugging Face model directory")
    dtype: Literal["auto", "float32", "bfloat16"] = Field(
        "auto", description="of weights, and of the KV cache if kv_dtype is auto"
    )
    kv_dtype: Literal["auto", "bf16", "int8", "bf16>int8"] = Field(
        "auto",
        description="format of the KV cache and of hand-offs; auto: that of dtype; int8: a byte per number, a scale per "
        "token and head, about half the memory of bf16 (page_size a multiple of 8; the output differs from bf16's); "
        "bf16>int8: bf16 at prefill workers, int8 at decode workers, which convert what arrives. One value per deployment",
    )
    quantization: Literal["auto", "int8", "fp8", "int4"] = Field(
        "auto",
        description="of matrices; auto: as they are stored; int8: int8 weights with a scale per output, multiplied by "
        "rows of int8, output head included; fp8, int4: an unquantised checkpoint is rounded while it is loaded, in "
        "groups of 128 inputs, but for the output head. One value per deployment",
    )
    device: str = Field(
        "auto",
        pattern=r"^(auto|cpu|cuda(:\d{1,3})?)$",
        description="auto, cpu, cuda (rank n on the node's n-th card) or cuda:N, that one card",
    )
    max_model_len: int = Field(
        0, ge=0, description="longest context in tokens; default, and 0 in files: the model's own"
    )
    kv_memory_bytes: Bytes = Field(
        0,
        ge=0,
        description="KV pool of one rank, e.g. 40GiB; 0 = what memory_utilization leaves",
        json_schema_extra={"flag": "kv_memory"},
    )
    memory_utilization: float = Field(
        0.9,
        gt=0,
        le=1,
        description="share of the memory (a card's; on CPUs the container's or machine's) that may be in use in all, by "
        "other processes too; the KV pool gets what weights, the largest step and hand-off buffers leave of it",
    )
    memory_bytes: Bytes = Field(
        0,
        ge=0,
        description="most that one rank takes in all, e.g. 16GiB; 0 = no limit of its own. `baton up` divides the "
        "memory of the machine, or of a card, between the ranks there",
        json_schema_extra={"flag": "memory"},
    )
    page_size: int = Field(16, ge=1, description="tokens per KV block; one value per deployment")
    max_batch_tokens: int = Field(
        2048, ge=1, le=1 << 24, description="token budget of one step (prefill chunk size)"
    )
    max_batch_requests: int = Field(256, ge=1, description="requests in one step")
    chunked_prefill: bool = Field(True, description="split long prompts over steps")
    prefix_caching: bool = Field(
        True, description="keep the KV blocks of ended requests for prompts that begin alike"
    )
    attention_backend: str = Field("auto", description="auto | cpu | sdpa | triton | varlen | flash")
    cuda_graphs: bool = Field(
        True, description="record decode steps before the first request and replay them; on CUDA only"
    )
    warm_up_seconds: Seconds = Field(
        300.0,
        gt=0,
        description="longest time for compiling kernels, and again for recording decode steps, before the worker is ready",
    )
    overlap: Literal["auto", "on", "off"] = Field(
        "auto",
        description="launch a decode step before the host has read the tokens of the last one; auto: on CUDA. Never with "
        "tensor_parallel above 1",
    )
    speculation: Literal["none", "ngram"] = Field(
        "none",
        description="speculative decoding while few requests run: draft tokens are verified in the same step as each "
        "request's last token. ngram: prompt lookup, the tokens that followed its last ones earlier in its prompt or "
        "output. The output does not change; needs overlap auto or off",
    )
    draft_model: Path | None = Field(
        None,
        description="directory of a small model with the same tokenizer: speculative decoding with the drafts of this "
        "model, on decode workers only and without speculation ngram. The output does not change; needs overlap auto or "
        "off",
    )
    draft_kv_memory_bytes: Bytes = Field(
        0,
        ge=0,
        description="KV pool of the draft model, e.g. 1GiB; 0 = eight requests of 4096 tokens, or of the longest context "
        "if that is less",
        json_schema_extra={"flag": "draft_kv_memory"},
    )
    speculative_tokens: int = Field(
        0,
        ge=0,
        le=15,
        description="with speculation or a draft_model, most draft tokens of a request in a step; 0 = 4",
    )
    tensor_parallel: int = Field(1, ge=1, description="ranks of this worker")
    expert_parallel: bool = Field(
        False,
        description="of a mixture of experts, each rank has whole experts instead of a share of every one",
    )
    nodes: int = Field(
        1,
        ge=1,
        description="nodes that the ranks are spread over; above 1, Ray places those on other nodes",
    )
    threads: int = Field(1, ge=1, le=1024, description="CPU threads of one rank")
    lora: tuple[str, ...] = Field(
        (),
        description="an adapter to load at the start, NAME=DIR; may be given several times. A request whose model is NAME "
        "is computed with the low-rank weights in DIR, as PEFT saves them",
    )
    max_loras: int = Field(
        0,
        ge=0,
        le=adapters.MAX_ADAPTERS,
        description="adapters that may be loaded at a time, whose memory is taken at the start; 0 = as many as lora names",
    )
    max_lora_rank: int = Field(16, ge=1, le=1024, description="highest rank of an adapter; sizes that memory")
    recompute_limit_tokens: int = Field(
        0,
        ge=0,
        description="a preempted request longer than this returns to the router instead of being computed again here, in "
        "the running batch; 0 = no limit",
    )

    @property
    def step_tokens(self) -> int:
        """Most tokens of one step, once max_model_len is resolved: without chunks a whole prompt is one step."""
        return (
            self.max_batch_tokens if self.chunked_prefill else max(self.max_batch_tokens, self.max_model_len)
        )

    @property
    def context_blocks(self) -> int:
        """KV blocks of the longest context, once max_model_len is resolved."""
        return -(-self.max_model_len // self.page_size)

    @property
    def adapter_slots(self) -> int:
        return self.max_loras or len(self.lora)

    @property
    def adapter_directories(self) -> dict[str, Path]:
        """Directories of the adapters to load at the start, by name."""
        return dict(adapters.parse(entry) for entry in self.lora)

    @property
    def draft_source(self) -> DraftSource | None:
        return speculation.draft_source(self)

    @property
    def most_drafts(self) -> int:
        """Most draft tokens of a request in a step; 0 without speculation."""
        return 0 if self.draft_source is None else self.speculative_tokens or speculation.DEFAULT_DRAFTS

    @model_validator(mode="after")
    def _drafts_are_possible(self) -> EngineConfig:
        speculation.check(self)
        return self

    @model_validator(mode="after")
    def _adapters_fit(self) -> EngineConfig:
        adapters.check(self.lora, self.max_loras)
        return self

    @model_validator(mode="after")
    def _one_card_is_one_rank(self) -> EngineConfig:
        if ":" in self.device and self.tensor_parallel > 1:
            raise ValueError(
                f"device {self.device} is one card, tensor_parallel {self.tensor_parallel} needs as many: use cuda, and "
                f"select the cards with CUDA_VISIBLE_DEVICES"
            )
        return self


SLOT_MULTIPLE = 1 << 8  # keeps every slot aligned
MAX_SLOT_BYTES = 32 << 20  # leaves room for what surrounds a part in a gRPC message
# Defaults of workers on GPUs (docs/adr/0150). A GPU copies a part of 4 MiB in microseconds, so messages, polls and
# launches would take most of a hand-off's time.
GPU_TRANSFER = {
    "slot_bytes": 16 << 20,
    "part_bytes": 16 << 20,
    "staging_bytes": 256 << 20,
    "ring_bytes": 256 << 20,
    "ring_max_bytes": 1 << 30,
}


class TransferConfig(Frozen):
    """How KV moves between workers."""

    panel = "KV transfer"

    transport: Literal["auto", "nixl", "grpc"] = Field("auto", description="transport of KV between workers")
    require_transport: Literal["", "nixl", "grpc", "rdma"] = Field(
        "",
        description="refuse a pair of workers on any other transport; rdma: NIXL without TCP between hosts",
    )
    port_range: str = Field(
        "",
        pattern=r"^(\d+-\d+)?$",
        description="ports that NIXL may listen on over TCP, e.g. 41000-41063 (for firewalls); default: any",
    )
    ring_bytes: Bytes = Field(128 << 20, ge=1 << 16, description="landing ring of one rank; on GPUs 256 MiB")
    ring_max_bytes: Bytes = Field(
        512 << 20,
        ge=0,
        description="limit of the ring's growth while slots are quarantined; on GPUs 1 GiB. 0, or less than "
        "ring_bytes: no growth; a GPU's ring without a given ring_bytes is then as small as this, or four slots",
    )
    slot_bytes: Bytes = Field(
        4 << 20,
        ge=1 << 12,
        le=MAX_SLOT_BYTES,
        multiple_of=SLOT_MULTIPLE,
        description="one landing slot; the largest part, but over gRPC 4 MiB; on GPUs 16 MiB",
    )
    part_bytes: Bytes = Field(
        4 << 20, ge=1 << 12, description="a part is sent as soon as this much is computed; on GPUs 16 MiB"
    )
    staging_bytes: Bytes = Field(
        64 << 20, ge=1 << 16, description="send staging of one rank; on GPUs 256 MiB"
    )
    digests: Literal["off", "sample", "all"] = Field(
        "all", description="parts whose bytes are verified on arrival; sample: a share, digest_sample_share"
    )
    digest_sample_share: float = Field(
        0.125, gt=0, le=1, description="share of parts verified with digests: sample"
    )

    @model_validator(mode="after")
    def _can_be_met(self) -> TransferConfig:
        if self.required and self.transport not in ("auto", self.required):
            raise ValueError(
                f"transport {self.transport} never meets require_transport {self.require_transport}: make them equal, "
                f"or transport auto"
            )
        return self

    @model_serializer(mode="wrap")
    def _as_given(self, write: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Leave out GPU_TRANSFER's sizes that were not given: the worker that reads this chooses those of its device."""
        written: dict[str, Any] = write(self)
        given = self.model_fields_set
        return {name: value for name, value in written.items() if name not in GPU_TRANSFER or name in given}

    def for_gpus(self) -> TransferConfig:
        """Return these settings with GPU_TRANSFER's sizes, except for sizes that were given. Slots are as small as needed
        for a given ring to hold four of them, and a given staging two."""
        given, sizes = self.model_fields_set, dict(GPU_TRANSFER)
        for name, slots in (("ring_bytes", 4), ("ring_max_bytes", 4), ("staging_bytes", 2)):
            if name in given:
                most = max(getattr(self, name) // slots, self.slot_bytes) // SLOT_MULTIPLE * SLOT_MULTIPLE
                sizes["slot_bytes"] = min(sizes["slot_bytes"], most)
        sizes["part_bytes"] = self.slot_bytes if "slot_bytes" in given else sizes["slot_bytes"]
        if "ring_max_bytes" in given:
            sizes["ring_bytes"] = min(sizes["ring_bytes"], self.ring_max_bytes)
        return self.model_copy(update={name: size for name, size in sizes.items() if name not in given})

    @property
    def required(self) -> str:
        """The transport that must be used (`rdma` is NIXL's); "" = either."""
        return "nixl" if self.require_transport == "rdma" else self.require_transport


class TopologyConfig(Frozen):
    """Where this worker is. What is set here goes before the node's labels, which are read if `node_name` is set."""

    panel = "Topology"

    node_name: str = Field(
        "",
        description="Kubernetes node (spec.nodeName); its labels are read through the API",
        json_schema_extra={"environment": "NODE_NAME"},
    )
    clique: str = Field("", description="NVLink domain")
    host: str = Field("", description="machine; default: the node's, or this host's name")
    rack: str = Field("", description="rack of this host, where no label says it")
    zone: str = Field("", description="zone of this host, where no label says it")
    clique_label: str = Field("nvidia.com/gpu.clique", description="node label of the clique")
    host_label: str = Field("kubernetes.io/hostname", description="node label of the host")
    rack_label: str = Field("topology.kubernetes.io/rack", description="node label of the rack")
    zone_label: str = Field("topology.kubernetes.io/zone", description="node label of the zone")
    kubeconfig: Path | None = Field(None, description="default: the pod's service account")
    api_seconds: float = Field(
        5.0, gt=0, description="limit for reading the labels; after it the worker starts without them"
    )


class WorkerConfig(ClusterFields, IndexFields, SecretFields, TlsFields, TelemetryFields):
    """One prefill or decode worker."""

    panel = "Worker"

    role: Role = no_flag(..., description="prefill or decode")
    worker_id: ProcessName = Field("", description="unique; default: the role and a random suffix")
    served_model_name: str = Field(
        "",
        max_length=256,
        description="which of the models of a router this worker serves, by the name that clients use; empty = the first",
    )
    host: str = Field("127.0.0.1", min_length=1, description="address to listen on; 0.0.0.0 or :: = all")
    advertise_host: str = Field(
        "",
        description="name or address under which others reach this worker (a pod's IP); default: host, or where that is "
        "all addresses, the one from which this machine reaches Redis",
    )
    port: int = Field(0, ge=0, le=65535, description="gRPC port; 0 = any")
    link_port: int = Field(0, ge=0, le=65535, description="port for the links of routers; 0 = any")
    metrics_port: int = Field(0, ge=0, le=65535, description="port of /metrics, /ready and /live; 0 = any")
    topology: TopologyConfig = TopologyConfig()
    engine: EngineConfig
    transfer: TransferConfig = TransferConfig()
    ray_address: str = Field(
        "auto",
        description="Ray that places ranks on other nodes, host:port; one of its nodes must be on this machine",
    )
    peer_exits: Literal["none", "kubernetes"] = Field(
        "none",
        description="where a decode worker asks whether a prefill worker that leaves landing slots in doubt has exited; "
        "none: only the parent of that process (`baton up`, Ray) can report it",
    )
    load_seconds: Seconds = Field(
        600.0, gt=0, description="how long Ray waits for a replica whose worker loads its model"
    )
    max_queued_requests: Count = Field(1024, ge=1, description="requests that may wait for a prefill")
    batch_aging_seconds: Seconds = Field(
        30.0,
        gt=0,
        description="a request that has waited for a prefill this long in its class counts as of the next higher class",
    )
    step_stall_seconds: Seconds = Field(
        30.0, gt=0, description="an engine that has work and makes no step for this long is dead"
    )
    lora_dir: Path | None = Field(
        None,
        description="directory below which administrators may name further adapters to load while the worker runs (POST "
        "/v1/load_lora_adapter at a router); needs max_loras. Default: none may be loaded",
    )
    drain_seconds: Seconds = Field(
        30.0, ge=0, description="time that a draining worker has to finish its requests"
    )
    drain_migrate_seconds: Seconds = Field(
        10.0,
        ge=0,
        description="after this long a draining worker returns its requests if another worker can continue them; routers "
        "resume them there",
    )
    fault_orders: Path | None = no_flag(
        None, description="tests only: a directory whose orders inject faults at named points"
    )

    @model_validator(mode="before")
    @classmethod
    def _name_worker(cls, values: Any) -> Any:
        if isinstance(values, dict) and not values.get("worker_id"):
            return {**values, "worker_id": f"{values.get('role', 'worker')}-{secrets.token_hex(3)}"}
        return values

    @model_validator(mode="after")
    def _speculation_is_of_decode_workers(self) -> Self:
        if self.role == "prefill":
            speculation.check_prefill(self.engine)
        return self

    @model_validator(mode="after")
    def _adapters_have_slots(self) -> Self:
        if self.lora_dir is not None and not self.engine.adapter_slots:
            raise ValueError("lora_dir needs max_loras: the memory of adapters is taken at the start")
        return self

    @model_validator(mode="after")
    def _tls_is_mutual(self) -> Self:
        if len({file is None for file in (self.tls_cert, self.tls_key, self.tls_ca)}) > 1:
            raise ValueError("tls_cert, tls_key and tls_ca belong together: a worker's TLS is mutual")
        return self
