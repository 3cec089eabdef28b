"""Metrics of routers."""

from __future__ import annotations

from functools import partial

from cluster.telemetry.histogram import (
    CALL_SECONDS,
    STAGE_SECONDS,
    TENANT_SECONDS,
    TOKEN_COUNTS,
    TOKEN_SECONDS,
)
from cluster.telemetry.metrics.declaration import Counter, Distribution, Gauge, Process

_OF: tuple[Process, ...] = ("router",)
counter, gauge, histogram = partial(Counter, _OF), partial(Gauge, _OF), partial(Distribution, _OF)

UNKNOWN_MODEL = "unknown"

# Requests, in vLLM's words where it has one. `model`: its name at this router, also for its aliases and adapters;
# UNKNOWN_MODEL where a request ended before its body was read, or named no model of this router
REQUESTS = counter("baton_requests_total", "requests", "Requests by how they ended", "model", "outcome")
REQUESTS_IN_FLIGHT = gauge(
    "baton_requests_in_flight", "requests", "Requests now in the router", together="sum"
)
MODEL_REQUESTS_IN_FLIGHT = gauge(
    "baton_model_requests_in_flight",
    "requests",
    "Requests of the model now in the router, from the reading of their bodies on",
    "model",
    together="sum",
)
PROCESSES = gauge("baton_processes", "processes", "Processes of the router that serve", together="sum")
PROCESS_RESTARTS = counter(
    "baton_process_restarts_total",
    "processes",
    "Processes of the router that have ended and were replaced",
)
REQUESTS_LIMIT = gauge("baton_requests_limit", "requests", "Requests that may be in flight here")
STAGES = histogram("baton_stage_seconds", "seconds", "Seconds by stage", STAGE_SECONDS, "model", "stage")
E2E = histogram(
    "baton_e2e_request_latency_seconds",
    "seconds",
    "Time of whole requests, from arrival to the last token",
    STAGE_SECONDS,
    "model",
)
TTFT = histogram(
    "baton_time_to_first_token_seconds", "seconds", "Time to first token", TOKEN_SECONDS, "model"
)
TPOT = histogram(
    "baton_request_time_per_output_token_seconds",
    "seconds",
    "Mean time between tokens of a request",
    TOKEN_SECONDS,
    "model",
)
ITL = histogram("baton_inter_token_latency_seconds", "seconds", "Time between tokens", TOKEN_SECONDS, "model")
REQUEST_PROMPT_TOKENS = histogram(
    "baton_request_prompt_tokens", "tokens", "Prompt tokens of each request", TOKEN_COUNTS, "model"
)
REQUEST_GENERATION_TOKENS = histogram(
    "baton_request_generation_tokens", "tokens", "Tokens sent for each request", TOKEN_COUNTS, "model"
)
PROMPT_TOKENS = counter("baton_prompt_tokens_total", "tokens", "Prompt tokens", "model")
GENERATION_TOKENS = counter("baton_router_generation_tokens_total", "tokens", "Tokens sent", "model")
PREFIX_CACHE_QUERIES = counter(
    "baton_router_prefix_cache_queries_total", "tokens", "Prompt tokens of placed requests", "model"
)
PREFIX_CACHE_HITS = counter(
    "baton_router_prefix_cache_hits_total",
    "tokens",
    "Prompt tokens of these that no worker computed",
    "model",
)
TOKENIZED_CACHE_HITS = counter(
    "baton_tokenized_cache_hits_total",
    "characters",
    "Characters of prompts whose tokens were cached",
    "model",
)
TOKENIZED_CACHE_MISSES = counter(
    "baton_tokenized_cache_misses_total",
    "characters",
    "Characters of prompts that were tokenised though there is a cache",
    "model",
)
TOKENIZED_CACHE_BYTES = gauge(
    "baton_tokenized_cache_bytes",
    "bytes",
    "Texts and tokens of pieces of prompts; tokenized_cache_bytes is the limit of all models",
    "model",
    together="sum",
)
KV_SHIPPED_BYTES = counter("baton_kv_shipped_bytes_total", "bytes", "KV handed over")
KV_NOT_SHIPPED_TOKENS = counter(
    "baton_kv_not_shipped_tokens_total", "tokens", "Prompt tokens the decode worker already held"
)
ATTEMPTS = counter("baton_attempts_total", "attempts", "Dispatch attempts")
RETRIES = counter("baton_retries_total", "attempts", "Attempts that did not end their request", "reason")

# By tenant; the first ones have series of their own, all others share one
TENANT_REQUESTS = counter(
    "baton_tenant_requests_total", "requests", "Requests by how they ended", "tenant", "result"
)
TENANT_REQUESTS_IN_FLIGHT = gauge(
    "baton_tenant_requests_in_flight", "requests", "Requests now in the router", "tenant", together="sum"
)
TENANT_PROMPT_TOKENS = counter("baton_tenant_prompt_tokens_total", "tokens", "Prompt tokens", "tenant")
TENANT_PREFIX_CACHE_HITS = counter(
    "baton_tenant_prefix_cache_hits_total", "tokens", "Prompt tokens that no worker computed", "tenant"
)
TENANT_GENERATION_TOKENS = counter("baton_tenant_generation_tokens_total", "tokens", "Tokens sent", "tenant")
TENANT_TTFT = histogram(
    "baton_tenant_time_to_first_token_seconds", "seconds", "Time to first token", TENANT_SECONDS, "tenant"
)

# Workers and placement
WORKERS = gauge("baton_workers", "workers", "Registered workers", "model", "role", "lease")
WORKERS_DRAINING = gauge("baton_workers_draining", "workers", "Workers that take nothing new", "role")
WORKERS_SUSPECT = gauge(
    "baton_workers_suspect", "workers", "Workers that have been silent on streams of this router"
)
LINK_UNREAD = counter(
    "baton_link_unread_total", "entries", "Tokens and ends that came for attempts no longer read"
)
MEMBERSHIP_AGE = gauge("baton_membership_age_seconds", "seconds", "Time since the membership was last read")
PLACEMENTS = counter(
    "baton_placements_total",
    "attempts",
    "Placements by the role that prefills, and by where they were decided: redis or router",
    "prefill",
    "by",
)
PLACEMENTS_REFUSED = counter(
    "baton_placements_refused_total", "attempts", "Placements refused, by reason", "reason"
)
PLACEMENT_CALLS = counter("baton_placement_calls_total", "calls", "Placement calls")
PLACEMENT_CHARGED = gauge(
    "baton_placement_charged_tokens",
    "tokens",
    "Tokens that this router has placed and that are not done yet",
    "stage",
    together="sum",
)
PLACEMENT_COST = histogram(
    "baton_placement_cost_seconds",
    "seconds",
    "Expected cost of the workers chosen, by term",
    STAGE_SECONDS,
    "term",
)
LEARNED_PREFILL = gauge(
    "baton_placement_learned_prefill_seconds_per_token",
    "seconds per token",
    "Prefill time per token that the cost model has learned",
    "model",
)
LEARNED_BANDWIDTH = gauge(
    "baton_placement_learned_bandwidth_bytes_per_second",
    "bytes per second",
    "Hand-off bandwidth that the cost model has learned or assumes, by the nearest topology level that a pair shares",
    "model",
    "level",
)

# Redis and quotas
REDIS_UP = gauge("baton_router_redis_up", "0 or 1", "1 while the membership can be read", together="min")
REDIS_ERRORS = counter(
    "baton_router_redis_errors_total", "calls", "Calls that Redis did not answer in time", "call"
)
REDIS_CALLS = histogram(
    "baton_redis_call_seconds", "seconds", "Redis calls that a request waits for", CALL_SECONDS, "call"
)
INDEX_UP = gauge(
    "baton_router_index_up",
    "0 or 1",
    "1 while placements are matched with the prefix index; it may have a Redis of its own",
    together="min",
)
REDIS_MEMORY_USED = gauge(
    "baton_redis_memory_used_bytes",
    "bytes",
    "Redis' used_memory; above 0.7 of its maxmemory placements are not predicted",
)
REDIS_MEMORY_MAX = gauge("baton_redis_memory_max_bytes", "bytes", "Redis' maxmemory; 0 = not set")
INDEX_MEMORY_USED = gauge(
    "baton_index_memory_used_bytes",
    "bytes",
    "used_memory of the Redis with the prefix index, the same or its own",
)
INDEX_MEMORY_MAX = gauge(
    "baton_index_memory_max_bytes", "bytes", "maxmemory of the Redis with the prefix index; 0 = not set"
)
INDEX_EVICTS_INDEX_ONLY = gauge(
    "baton_index_evicts_index_only",
    "0 or 1",
    "1 while the maxmemory-policy of the Redis with the prefix index is one of volatile-…, which evicts no worker's slot",
)
REDIS_EVICTS_INDEX_ONLY = gauge(
    "baton_redis_evicts_index_only",
    "0 or 1",
    "1 while Redis' maxmemory-policy is one of volatile-…, which evicts the prefix index only",
)
QUOTA_REFUSED = counter(
    "baton_quota_refused_total", "requests", "Requests beyond their tenant's quota", "limit"
)
QUOTA_UNCHECKED = counter(
    "baton_quota_unchecked_total", "requests", "Requests whose quota was not checked: Redis was gone"
)
QUOTA_TAKEN_OVER = counter(
    "baton_quota_taken_over_total", "requests", "Charges of requests that came from another router"
)
QUOTA_UNSETTLED = gauge(
    "baton_quota_unsettled", "settlements", "Quota settlements that wait for Redis", together="sum"
)
QUOTA_SETTLEMENTS_DROPPED = counter(
    "baton_quota_settlements_dropped_total", "settlements", "Quota settlements dropped: too old or too many"
)
