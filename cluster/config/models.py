"""Configuration: one frozen model per role, read from YAML, environment (`BATON_…`) and flags, in rising order.

`"auto"` values are resolved once, by the process that owns them, into a new object; nothing else reads the
environment.
"""

from __future__ import annotations

import secrets
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

Role = Literal["prefill", "decode"]
LocalPrefill = Literal["never", "fallback", "auto"]
MetricsAliases = Literal["none", "vllm"]
# gRPC counts in 32 bits: bytes, streams, milliseconds.
MAX_COUNT = 2**30
Seconds = Annotated[float, Field(le=1e6)]
Count = Annotated[int, Field(le=MAX_COUNT)]


class Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class EngineConfig(Frozen):
    """How one engine runs its model."""

    model: Path = Field(description="Hugging Face model directory")
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    device: str = Field(
        "auto",
        pattern=r"^(auto|cpu|cuda(:\d+)?)$",
        description="auto, cpu, cuda (rank n on the node's n-th card) or cuda:N, that one card",
    )
    max_model_len: int = Field(0, ge=0, description="longest context in tokens; 0 = the model's own")
    kv_memory_bytes: int = Field(0, ge=0, description="KV pool of one rank; 0 = chosen from free memory")
    page_size: int = Field(16, ge=1, description="tokens in a block; one value per deployment")
    max_batch_tokens: int = Field(2048, ge=1, description="token budget of one step (prefill chunk size)")
    max_batch_requests: int = Field(256, ge=1)
    chunked_prefill: bool = True
    prefix_caching: bool = True
    attention_backend: str = Field("auto", description="auto | cpu | sdpa | varlen | flash")
    tensor_parallel: int = Field(1, ge=1)
    nodes: int = Field(
        1,
        ge=1,
        description="that its ranks are spread over; beyond 1, Ray places those that are not on the worker's own",
    )
    threads: int = Field(1, ge=1, le=1024, description="CPU threads of one rank")
    recompute_limit_tokens: int = Field(
        0,
        ge=0,
        description="a preempted request longer than this goes back to the router instead of being computed "
        "again here, in the running batch; 0 = no limit",
    )

    @model_validator(mode="after")
    def _one_card_is_one_rank(self) -> EngineConfig:
        if ":" in self.device and self.tensor_parallel > 1:
            raise ValueError(
                f"device {self.device} is one card, tensor_parallel {self.tensor_parallel} needs as many: use cuda, and "
                f"CUDA_VISIBLE_DEVICES for which they are"
            )
        return self


class TransferConfig(Frozen):
    """How KV moves between workers."""

    transport: Literal["auto", "nixl", "grpc"] = "auto"
    require_transport: Literal["", "nixl", "grpc", "rdma"] = Field(
        "",
        description="refuse to start a pair on any other transport; rdma: NIXL with no TCP between hosts",
    )
    port_range: str = Field(
        "",
        pattern=r"^(\d+-\d+)?$",
        description="ports NIXL may listen on over TCP, e.g. 41000-41063 (for firewalls); default: any",
    )
    ring_bytes: int = Field(128 << 20, ge=1 << 16, description="landing ring of one rank")
    ring_max_bytes: int = Field(512 << 20, description="the ring's growth limit while slots are quarantined")
    # The bound leaves room for what surrounds a part in a gRPC message, the multiple keeps every slot aligned.
    slot_bytes: int = Field(
        4 << 20, ge=1 << 12, le=32 << 20, multiple_of=1 << 8, description="one landing slot; the largest part"
    )
    part_bytes: int = Field(4 << 20, ge=1 << 12, description="send a part as soon as this much is computed")
    staging_bytes: int = Field(64 << 20, ge=1 << 16, description="send staging of one rank")
    digests: Literal["off", "sample", "all"] = Field(
        "all", description="parts whose bytes are verified on arrival; of a sample, digest_sample_share"
    )
    digest_sample_share: float = Field(0.125, gt=0, le=1)

    @model_validator(mode="after")
    def _can_be_met(self) -> TransferConfig:
        if self.required and self.transport not in ("auto", self.required):
            raise ValueError(
                f"transport {self.transport} never meets require_transport {self.require_transport}: make them equal, "
                f"or transport auto"
            )
        return self

    @property
    def required(self) -> str:
        """Which of the two transports must be used; RDMA is NIXL's affair. "" = either."""
        return "nixl" if self.require_transport == "rdma" else self.require_transport


class TopologyConfig(Frozen):
    """Where this worker is. What is named here wins over the node's labels, which are read where `node_name` is."""

    node_name: str = Field(
        "", description="Kubernetes node (spec.nodeName); its labels are read through the API"
    )
    clique: str = Field("", description="NVLink domain")
    host: str = Field("", description="machine; default: the node's, or this host's name")
    rack: str = ""
    zone: str = ""
    clique_label: str = "nvidia.com/gpu.clique"
    host_label: str = "kubernetes.io/hostname"
    rack_label: str = "topology.kubernetes.io/rack"
    zone_label: str = "topology.kubernetes.io/zone"
    kubeconfig: Path | None = Field(None, description="default: the pod's service account")
    api_seconds: float = Field(5.0, gt=0, description="after that the worker starts without labels")


class TlsFields(Frozen):
    """Who this process is to Baton's others, and whom it believes (PEM files, read again when they change)."""

    tls_cert: Path | None = Field(None, description="certificate chain; none = plain text")
    tls_key: Path | None = None
    tls_ca: Path | None = Field(
        None, description="authority of the cluster's own certificates: nothing else may be signed by it"
    )


class ClusterFields(Frozen):
    """Which cluster this process belongs to. Files win nothing: a secret has one source (cluster/config/sources.py)."""

    redis_url: str = Field("", description="redis://…, rediss://… or unix://…", repr=False)
    redis_password: str = Field("", description="for a redis_url without one", repr=False)
    redis_password_file: Path | None = Field(None, description="a file that holds it (a mounted Secret)")
    namespace: str = Field("baton", description="prefix of every Redis key of this deployment")


class SecretFields(Frozen):
    secret: str = Field(
        "",
        description="deployment secret that keys the block hashes and the resume tickets; required, and the same in all "
        "routers and workers",
        repr=False,
    )
    secret_file: Path | None = Field(None, description="a file that holds it (a mounted Secret)")


class TelemetryFields(Frozen):
    """What this process says about itself beside its logs (docs/observability.md)."""

    metrics_aliases: MetricsAliases = Field("none", description="vllm: vLLM's metric names beside Baton's")
    otlp_endpoint: str = Field(
        "",
        description="collector of traces (OTLP over HTTP); none = OTEL_EXPORTER_OTLP_ENDPOINT, or no traces",
    )
    trace_sample_ratio: float | None = Field(
        None,
        ge=0,
        le=1,
        description="share of requests traced whose client decides nothing; none = OTEL_…, or all",
    )


class WorkerConfig(ClusterFields, SecretFields, TlsFields, TelemetryFields):
    """One prefill or decode worker."""

    role: Role
    worker_id: str = Field("", description="unique per process; default: the role and a random suffix")
    host: str = Field("127.0.0.1", description="address to listen on; 0.0.0.0 or :: = all")
    advertise_host: str = Field(
        "",
        description="name or address under which others reach this worker (a pod's IP); default: host, or where "
        "that is all addresses, the one from which this machine reaches Redis",
    )
    port: int = Field(0, ge=0, le=65535, description="gRPC port; 0 = chosen by the system")
    metrics_port: int = Field(0, ge=0, le=65535, description="/metrics, /ready and /live; 0 = any")
    topology: TopologyConfig = TopologyConfig()
    engine: EngineConfig
    transfer: TransferConfig = TransferConfig()
    ray_address: str = Field(
        "auto",
        description="Ray that places ranks on other nodes, host:port; a node of it must be on this machine",
    )
    peer_exits: Literal["none", "kubernetes"] = Field(
        "none",
        description="where a decode worker asks whether a prefill worker has exited that leaves landing slots in doubt; "
        "none: only the parent of that process (`baton up`, Ray) can report it",
    )
    load_seconds: Seconds = Field(
        600.0, gt=0, description="how long Ray waits for a replica whose worker loads its model"
    )
    max_queued_requests: Count = Field(1024, ge=1)
    batch_aging_seconds: Seconds = Field(
        30.0,
        gt=0,
        description="a request that has queued for a prefill this long in its class counts as of the next higher one",
    )
    step_stall_seconds: Seconds = Field(
        30.0, gt=0, description="an engine with work that stands still this long is dead"
    )
    drain_seconds: Seconds = Field(
        30.0, ge=0, description="what a worker that leaves may take to finish its requests"
    )
    drain_migrate_seconds: Seconds = Field(
        10.0,
        ge=0,
        description="and after this long it gives them back if another worker can go on with them; routers resume "
        "them there, token by token",
    )
    fault_orders: Path | None = Field(
        None, description="tests only: a directory whose orders break this process at named points"
    )

    @model_validator(mode="before")
    @classmethod
    def _name_worker(cls, values: Any) -> Any:
        if isinstance(values, dict) and not values.get("worker_id"):
            return {**values, "worker_id": f"{values.get('role', 'worker')}-{secrets.token_hex(3)}"}
        return values

    @model_validator(mode="after")
    def _tls_is_mutual(self) -> Self:
        if len({file is None for file in (self.tls_cert, self.tls_key, self.tls_ca)}) > 1:
            raise ValueError("tls_cert, tls_key and tls_ca belong together: a worker's TLS is mutual")
        return self


class RouterConfig(ClusterFields, SecretFields, TlsFields, TelemetryFields):
    """One router."""

    drain_seconds: Seconds = Field(
        30.0, ge=0, description="what a router that leaves may take to finish its streams"
    )
    drain_delay_seconds: Seconds = Field(
        0.0,
        ge=0,
        description="how long after SIGTERM it still takes requests, already not ready: load balancers need a moment "
        "to notice, and clients to come by another connection (max_connection_seconds)",
    )
    max_connection_seconds: Seconds = Field(
        3600.0,
        ge=0,
        description="gRPC connections so old (a tenth more or less) are told to come anew; requests on them finish. "
        "Behind a load balancer clients then move to other routers by themselves; 0 = they stay",
    )
    router_id: str = Field(default_factory=lambda: f"router-{secrets.token_hex(4)}")
    host: str = "127.0.0.1"
    http_port: int = Field(8000, ge=0, le=65535)
    grpc_port: int = Field(50051, ge=0, le=65535)
    metrics_port: int | None = Field(
        None,
        ge=0,
        le=65535,
        description="/metrics, /ready and /live without TLS and keys, for probes and Prometheus inside a cluster; "
        "0 = any; none = only at the HTTP door",
    )
    model: Path = Field(description="model directory: tokenizer, chat template, generation config")
    served_model_name: str = Field("", description="name clients use; default: the directory's name")
    max_model_len: Count = Field(0, ge=0, description="tokens of prompt and answer; 0 = the model's own")
    page_size: int = Field(16, ge=1)
    local_prefill: LocalPrefill = "auto"
    aggregated: bool = Field(False, description="decode workers prefill everything themselves")
    index_feeds: Literal["hybrid", "reported", "predicted"] = "hybrid"
    admission_seconds: Seconds = Field(30.0, gt=0, description="how long a request may wait for a place")
    ttft_target_seconds_high: Seconds = Field(
        10.0,
        ge=0,
        description="requests whose first token would come later are refused at once; 0 = none are",
    )
    ttft_target_seconds_normal: Seconds = Field(30.0, ge=0)
    ttft_target_seconds_batch: Seconds = Field(120.0, ge=0)
    request_seconds: Seconds = Field(
        600.0, gt=0, description="longest life of a request without a client deadline"
    )
    max_attempts: Count = Field(8, ge=1, description="dispatches of one request to workers")
    door_tls_cert: Path | None = Field(None, description="what clients are shown; default: tls_cert")
    door_tls_key: Path | None = None
    tls_client_ca: Path | None = Field(
        None, description="clients must bring a certificate of this authority; none = they need not"
    )
    max_concurrent_requests: Count = Field(1024, ge=1, description="requests in flight at this router")
    max_concurrent_requests_per_tenant: Count = Field(0, ge=0, description="0 = no limit of its own")
    requests_per_minute_per_tenant: Count = Field(
        0, ge=0, description="over all routers; a key's own requests_per_minute goes before it; 0 = no limit"
    )
    tokens_per_minute_per_tenant: int = Field(
        0,
        ge=0,
        le=10**12,
        description="of prompts and answers, over all routers; a key's own goes first; 0 = no limit",
    )
    max_concurrent_requests_per_connection: Count = Field(512, ge=0, description="0 = no limit of its own")
    api_keys_file: Path | None = Field(None, description="YAML or JSON list of API keys; none = no keys")
    unknown_fields: Literal["refuse", "ignore"] = Field(
        "refuse",
        description="unknown fields of an OpenAI request: refused by name, or ignored as vLLM does; "
        "known fields that are not supported are refused either way",
    )
    priority_order: Literal["higher_first", "lower_first"] = Field(
        "higher_first",
        description="whether a higher or a lower number in an OpenAI request's `priority` comes first; vLLM: lower_first",
    )
    cors_origins: tuple[str, ...] = Field(
        (),
        description="origins whose pages may call this router from a browser (CORS); * = all; empty = none",
    )
    ui: bool = Field(True, description="serve the page at /ui: topology, percentiles, a playground")
    share_prefixes_across_tenants: bool = Field(
        False, description="let tenants hit each other's cached prefixes; timing then shows who sent what"
    )
    max_body_bytes: Count = Field(8 << 20, ge=1, description="of one HTTP body or gRPC message")
    max_body_bytes_in_flight: int = Field(
        256 << 20,
        ge=0,
        description="of requests not yet dispatched, over HTTP and gRPC; the first 64 KiB of each don't count, and a "
        "gRPC message that takes long to arrive counts as max_body_bytes",
    )
    max_body_bytes_in_flight_per_tenant: int = Field(
        64 << 20, ge=0, description="the same for one tenant; 0 = one body of max_body_bytes"
    )
    max_text_bytes: Count = Field(
        2 << 20,
        ge=1,
        description="of one prompt that is text: tokenising takes about 200 bytes of memory for each",
    )
    max_choices: Count = Field(16, ge=1, description="n")
    max_prompts: Count = Field(64, ge=1, description="prompts of one completion request")
    max_stop_strings: Count = Field(16, ge=1, description="in stop")
    max_stop_string_characters: Count = Field(1024, ge=1, description="of one string in stop")
    max_stop_token_ids: Count = Field(64, ge=0, description="in stop_token_ids")
    max_logit_bias: Count = Field(1024, ge=0, description="entries of logit_bias")
    max_logprobs: Count = Field(20, ge=0, description="alternatives for each token")
    max_answer_entries: Count = Field(
        1 << 18,
        ge=1,
        description="prompts x n x max_tokens x (1 + logprobs) of one request; without max_tokens, answers end there",
    )
    max_json_depth: Count = Field(32, ge=2, description="nested lists and objects of a body")
    max_json_elements: Count = Field(
        1 << 20, ge=1, description="of a body; lists, objects and members of objects count as 16"
    )
    max_header_bytes: Count = Field(32 << 10, ge=1 << 10, description="head of a request, or gRPC metadata")
    max_headers: Count = Field(100, ge=8, description="header lines of a request")
    max_http_connections: Count = Field(
        4096, ge=1, description="above it the longest idle one is closed, or the new one refused"
    )
    http_idle_seconds: Count = Field(
        75, ge=1, description="an HTTP connection on which no request comes for so long ends"
    )
    max_grpc_connections: Count = Field(1024, ge=1, description="more are closed at once")
    grpc_idle_seconds: Seconds = Field(
        60.0, gt=0, description="a gRPC connection without a call for so long ends"
    )
    max_health_watchers: Count = Field(
        256, ge=1, description="calls of gRPC's Health.Watch; the oldest makes room"
    )
    header_seconds: Seconds = Field(10.0, gt=0, description="for the head of a request to arrive")
    body_seconds: Seconds = Field(60.0, gt=0, description="for the body of a request to arrive")
    write_seconds: Seconds = Field(
        30.0, gt=0, description="a client that takes nothing for so long is cut off, its request cancelled"
    )
    fault_orders: Path | None = Field(
        None, description="tests only: a directory whose orders break this process at named points"
    )
