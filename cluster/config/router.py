"""Settings of a router."""

from __future__ import annotations

import secrets
from pathlib import Path
from typing import Literal

from pydantic import Field, model_validator

from cluster.config.base import Bytes, Count, Frozen, ProcessName, Seconds, no_flag
from cluster.config.shared import ClusterFields, IndexFields, SecretFields, TelemetryFields, TlsFields

LocalPrefill = Literal["never", "fallback", "auto", "always"]


class FurtherModel(Frozen):
    """A model that a router serves beside its first one."""

    name: str = Field(min_length=1, max_length=256, description="name that clients use")
    model: Path = Field(description="model directory: tokenizer, chat template, generation config")
    aliases: tuple[str, ...] = Field((), description="further names that clients may use")
    max_model_len: Count = Field(0, ge=0, description="longest context in tokens; 0 = the model's own")
    max_concurrent_requests: Count = Field(
        0, ge=0, description="of this model at this router; 0 = max_concurrent_requests_per_model"
    )
    tool_parser: str = Field("auto", description="format of its tool calls, as the first model's tool_parser")
    reasoning_parser: str = Field(
        "auto", description="format of its reasoning, as the first's reasoning_parser"
    )


class ModelFields(Frozen):
    panel = "Model"

    model: Path = Field(description="model directory: tokenizer, chat template, generation config")
    served_model_name: str = Field("", description="name that clients use; default: the directory's name")
    model_aliases: tuple[str, ...] = Field(
        (), description="further names that clients may use; answers show served_model_name"
    )
    models: tuple[FurtherModel, ...] = no_flag(
        (),
        max_length=64,
        description="models served beside the first, each with name, model (its directory) and, where wanted, aliases, "
        "max_model_len, max_concurrent_requests, tool_parser and reasoning_parser; their workers register with that name "
        "(served_model_name)",
    )
    max_model_len: Count = Field(
        0, ge=0, description="longest context in tokens; default, and 0 in files: the model's own"
    )
    tokenized_cache_bytes: Bytes = Field(
        64 << 20,
        ge=0,
        description="memory for tokens of pieces of earlier prompts, each within its tenant and cache_salt; models "
        "have equal shares; 0 = none",
    )
    page_size: int = Field(16, ge=1, description="tokens per KV block; one value per deployment")


class AddressFields(Frozen):
    panel = "Addresses"

    host: str = Field("127.0.0.1", min_length=1, description="address to listen on; 0.0.0.0 or :: = all")
    http_port: int = Field(8000, ge=0, le=65535, description="OpenAI HTTP; 0 = any")
    grpc_port: int = Field(50051, ge=0, le=65535, description="gRPC; 0 = any")
    processes: int = Field(
        1,
        ge=1,
        le=64,
        description="processes that serve behind the two ports as one router; each runs on one core at most",
    )
    metrics_port: int | None = Field(
        None,
        ge=0,
        le=65535,
        description="/metrics, /ready and /live without TLS and keys, for probes and Prometheus inside a cluster; "
        "0 = any; none = only at the HTTP port",
    )
    public_tls_cert: Path | None = Field(
        None, description="certificate that clients are shown; default: tls_cert"
    )
    public_tls_key: Path | None = Field(None, description="key of public_tls_cert")
    tls_client_ca: Path | None = Field(
        None, description="authority whose certificates clients must show; none = clients need none"
    )


class PlacementFields(Frozen):
    panel = "Placement"

    local_prefill: LocalPrefill = Field(
        "auto",
        description="prefill on decode workers: never; fallback = without a prefill worker; auto = also where that is "
        "faster; always = there are no prefill workers (aggregated)",
    )
    index_feeds: Literal["hybrid", "reported", "predicted"] = Field(
        "hybrid",
        description="sources of the prefix index: workers' reports, the router's predictions, or both",
    )
    max_attempts: Count = Field(
        8,
        ge=1,
        description="lost workers or internal errors in a row, without a new token, before a request fails",
    )


class OverloadFields(Frozen):
    panel = "Overload: which requests wait, which are refused"

    ttft_target_seconds_high: Seconds = Field(
        10.0,
        ge=0,
        description="a request of priority high whose first token would come later is refused at once; 0 = never",
    )
    ttft_target_seconds_normal: Seconds = Field(30.0, ge=0, description="the same for normal requests")
    ttft_target_seconds_batch: Seconds = Field(
        120.0, ge=0, description="the same for batch requests, which wait behind all others"
    )
    admission_seconds: Seconds = Field(
        30.0, gt=0, description="how long a request waits for a worker with room, or for workers at all"
    )
    max_concurrent_requests: Count = Field(1024, ge=1, description="requests in flight at this router")
    max_concurrent_requests_per_tenant: Count = Field(
        0,
        ge=0,
        description="of one tenant at this router; a key's max_concurrent_requests overrides it; 0 = with API keys half "
        "of max_concurrent_requests, or of max_http_connections if that is less; no limit without",
    )
    max_concurrent_requests_per_model: Count = Field(
        0,
        ge=0,
        description="of one model at this router; 0 = no limit with one model; with several half of "
        "max_concurrent_requests, and of N > 2 models each has 1 / (N - 1) of the other half whatever the others have",
    )
    max_concurrent_requests_per_connection: Count = Field(
        512, ge=0, description="of one connection; 0 = no limit"
    )
    requests_per_minute_per_tenant: Count = Field(
        0,
        ge=0,
        description="over all routers, counted in Redis; a key's requests_per_minute overrides it; 0 = no limit",
    )
    tokens_per_minute_per_tenant: int = Field(
        0,
        ge=0,
        le=10**12,
        description="of prompts and answers, over all routers; a key's tokens_per_minute overrides it; 0 = no limit",
    )


class ApiFields(Frozen):
    panel = "API"

    api_keys_file: Path | None = Field(
        None, description="API keys (YAML or JSON; see baton keys); none = requests need no key"
    )
    unknown_fields: Literal["refuse", "ignore"] = Field(
        "refuse",
        description="unknown fields of an OpenAI request: refused by name, or ignored as vLLM does; known fields that are "
        "not supported are refused either way",
    )
    priority_order: Literal["higher_first", "lower_first"] = Field(
        "higher_first",
        description="whether a higher or a lower number in an OpenAI request's `priority` goes first; vLLM: lower_first",
    )
    tool_parser: str = Field(
        "auto",
        description="format of the first model's tool calls (entries of models have their own): auto = from its chat "
        "template; none = requests may have no tools; or the name of a parser (docs/api.md)",
    )
    reasoning_parser: str = Field(
        "auto",
        description="format of the first model's reasoning (entries of models have their own): auto = from its chat "
        "template; none = it stays part of the content; or the name of a parser (docs/api.md)",
    )
    cors_origins: tuple[str, ...] = Field(
        (),
        description="origins whose pages may call this router from a browser (CORS); * = all; empty = none. Without API "
        "keys requests that name another origin are refused, and over loopback those to a host of the public DNS",
    )
    ui: bool = Field(True, description="serve the page at /ui: topology, percentiles, a playground")
    share_prefixes_across_tenants: bool = Field(
        False,
        description="share cached prefixes between tenants; response times then reveal what other tenants have sent",
    )


class RequestLimits(Frozen):
    panel = "Limits of a request"

    request_seconds: Seconds = Field(
        600.0, gt=0, description="longest duration of a request without a client deadline"
    )
    max_body_bytes: Bytes = Field(8 << 20, ge=1, le=1 << 30, description="one HTTP body or gRPC message")
    max_body_bytes_in_flight: Bytes = Field(
        256 << 20,
        ge=0,
        description="bodies of requests not yet dispatched, and what answers repeat of them, over HTTP and gRPC, and "
        "whole answers of HTTP and of Embed not yet read; the first 64 KiB of each don't count, and a gRPC message that "
        "takes long to arrive counts as max_body_bytes",
    )
    max_body_bytes_in_flight_per_tenant: Bytes = Field(
        64 << 20, ge=0, description="the same for one tenant; 0 = one body of max_body_bytes"
    )
    max_text_bytes: Bytes = Field(
        2 << 20,
        ge=1,
        le=1 << 30,
        description="one prompt that is text; tokenising takes about 200 bytes of memory for each",
    )
    max_choices: Count = Field(16, ge=1, description="answers per prompt (n)")
    max_prompts: Count = Field(
        64, ge=1, description="prompts of one completion request, or inputs of one for embeddings"
    )
    max_stop_strings: Count = Field(16, ge=1, description="entries of stop")
    max_stop_string_characters: Count = Field(1024, ge=1, description="characters of one string in stop")
    max_stop_token_ids: Count = Field(64, ge=0, description="entries of stop_token_ids")
    max_logit_bias: Count = Field(1024, ge=0, description="entries of logit_bias")
    max_allowed_token_ids: Count = Field(1 << 17, ge=0, description="entries of allowed_token_ids")
    max_bad_words: Count = Field(128, ge=0, description="entries of bad_words")
    max_bad_word_characters: Count = Field(256, ge=1, description="characters of one entry of bad_words")
    max_logprobs: Count = Field(20, ge=0, description="alternatives for each token")
    max_answer_entries: Count = Field(
        1 << 18,
        ge=1,
        description="prompts x n x max_tokens x (1 + logprobs) of one request; without max_tokens, answers end there",
    )
    max_tools: Count = Field(128, ge=0, description="tools of one request")
    max_tool_bytes: Bytes = Field(256 << 10, ge=0, description="all tools of one request, as JSON")
    max_json_depth: Count = Field(32, ge=2, description="nested lists and objects of a body")
    max_json_elements: Count = Field(
        1 << 20,
        ge=1,
        description="elements of a body; texts and numbers with a fraction or an exponent count as 8, lists, objects and "
        "members of objects as 16",
    )


class ConnectionLimits(Frozen):
    panel = "Limits of connections"

    max_header_bytes: Count = Field(32 << 10, ge=1 << 10, description="head of a request, or gRPC metadata")
    max_headers: Count = Field(100, ge=8, description="header lines of a request")
    max_http_connections: Count = Field(
        4096, ge=1, description="above it the longest idle connection is closed, or the new one refused"
    )
    http_idle_seconds: Count = Field(
        75, ge=1, description="an HTTP connection without a request for this long is closed"
    )
    max_grpc_connections: Count = Field(
        1024,
        ge=1,
        description="gRPC connections from each eighth of all addresses (with several processes, or on other systems than "
        "Linux: from all); further ones are closed at once",
    )
    grpc_idle_seconds: Seconds = Field(
        60.0, gt=0, description="a gRPC connection without a call for this long is closed"
    )
    max_connection_seconds: Seconds = Field(
        3600.0,
        ge=0,
        description="a gRPC connection of this age (10% more or less) is closed once its requests have ended, so that "
        "clients behind a load balancer move to other routers; 0 = never",
    )
    max_health_watchers: Count = Field(
        256,
        ge=1,
        description="calls of gRPC's Health.Watch; beyond it the oldest of the address with the most ends",
    )
    header_seconds: Seconds = Field(10.0, gt=0, description="for the head of a request to arrive")
    body_seconds: Seconds = Field(60.0, gt=0, description="for the body of a request to arrive")
    write_seconds: Seconds = Field(
        30.0,
        gt=0,
        description="a client that receives less than 64 KiB of what waits for it in this time is disconnected, and its "
        "request cancelled",
    )


class RouterConfig(
    ClusterFields,
    IndexFields,
    SecretFields,
    TlsFields,
    TelemetryFields,
    ConnectionLimits,
    RequestLimits,
    ApiFields,
    OverloadFields,
    PlacementFields,
    AddressFields,
    ModelFields,
):
    """One router."""

    panel = "Router"

    router_id: ProcessName = Field(
        default_factory=lambda: f"router-{secrets.token_hex(4)}", description="unique; default: a random one"
    )
    drain_seconds: Seconds = Field(
        30.0, ge=0, description="time that a draining router has to finish its streams"
    )
    drain_delay_seconds: Seconds = Field(
        0.0,
        ge=0,
        description="time after SIGTERM in which requests are still accepted while /ready answers 503, for load balancers "
        "to notice and clients to reconnect (max_connection_seconds)",
    )
    fault_orders: Path | None = no_flag(
        None, description="tests only: a directory whose orders inject faults at named points"
    )

    @property
    def served_name(self) -> str:
        """The name of the first model."""
        return self.served_model_name or self.model.name

    @property
    def model_names(self) -> tuple[str, ...]:
        """The names of all models, the first before the others."""
        return (self.served_name, *(one.name for one in self.models))

    @property
    def all_aliases(self) -> tuple[str, ...]:
        return (*self.model_aliases, *(alias for one in self.models for alias in one.aliases))

    def models_by_alias(self) -> dict[str, str]:
        found = dict.fromkeys(self.model_aliases, self.served_name)
        return found | {alias: one.name for one in self.models for alias in one.aliases}

    def by_model(self) -> dict[str, RouterConfig]:
        """The settings as each model has them, by its name."""
        found = {self.served_name: self}
        for one in self.models:
            own = {
                "model": one.model,
                "served_model_name": one.name,
                "model_aliases": one.aliases,
                "max_model_len": one.max_model_len,
                "tool_parser": one.tool_parser,
                "reasoning_parser": one.reasoning_parser,
            }
            found[one.name] = self.model_copy(update=own)
        return found

    @property
    def tokenized_cache_bytes_of_model(self) -> int:
        return self.tokenized_cache_bytes // len(self.model_names)

    def most_of_model(self, name: str) -> int:
        """Requests of one model that may be in flight; 0 = no limit of its own."""
        half = max(1, self.max_concurrent_requests // 2) if self.models else 0
        return self.given_most_of_model(name) or half

    def given_most_of_model(self, name: str) -> int:
        """The limit of a model that the settings give; 0 = none."""
        own = next((one.max_concurrent_requests for one in self.models if one.name == name), 0)
        return own or self.max_concurrent_requests_per_model

    @model_validator(mode="after")
    def _names_differ(self) -> RouterConfig:
        names = [*self.model_names, *self.all_aliases]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice or "" in names:
            raise ValueError(f"models: {(twice or [''])[0]!r} names two models, or is empty")
        for name in names:
            try:
                name.encode()
            except UnicodeEncodeError:  # of a directory whose name has other bytes
                raise ValueError(
                    f"models: {name!r} is not text in UTF-8, so no answer could show it: give served_model_name"
                ) from None
        return self
