"""Metrics of prefill and decode workers. Each sample also has the labels `worker` and `role`."""

from __future__ import annotations

from functools import partial

from cluster.telemetry.histogram import BATCH_SIZES, STAGE_SECONDS, TOKEN_COUNTS
from cluster.telemetry.metrics.declaration import Counter, Distribution, Gauge, Process

_OF: tuple[Process, ...] = ("prefill", "decode")
counter, gauge, histogram = partial(Counter, _OF), partial(Gauge, _OF), partial(Distribution, _OF)
_PREFILL: tuple[Process, ...] = ("prefill",)
_DECODE: tuple[Process, ...] = ("decode",)

# The worker in its cluster
READY = gauge("baton_worker_ready", "0 or 1", "1 while the worker accepts new work")
DRAINING = gauge(
    "baton_worker_draining",
    "0 or 1",
    "1 while the worker drains: it finishes its requests and accepts no new ones",
)
REGISTERED = gauge("baton_worker_registered", "0 or 1", "1 while Redis has given it a slot")
FENCED = counter("baton_worker_fenced_total", "epochs", "Epochs ended because the worker's lease had expired")
REDIS_UP = gauge("baton_worker_redis_up", "0 or 1", "1 while this worker reaches Redis")
REDIS_ERRORS = counter("baton_worker_redis_errors_total", "calls", "Calls that Redis did not answer in time")
RAY_HEAD_SILENT = gauge(
    "baton_worker_ray_head_silent_seconds",
    "seconds",
    "How long Ray's head has not responded; 0 while it does, and where neither the worker nor its ranks are on Ray",
)
INDEX_UP = gauge("baton_worker_index_up", "0 or 1", "1 while this worker's reports reach the prefix index")
INDEX_REPORTS_WAITING = gauge("baton_index_reports_waiting", "chains", "Prefix chains not yet reported")

# Requests and attempts
REQUESTS_RUNNING = gauge("baton_requests_running", "requests", "Sequences in the batch")
REQUESTS_WAITING = gauge("baton_requests_waiting", "requests", "Sequences waiting for the batch")
REQUESTS_WAITING_FOR_KV = gauge(
    "baton_requests_waiting_for_kv",
    "requests",
    "Sequences whose blocks are reserved and whose KV is still arriving",
)
ATTEMPTS_IN_PROGRESS = gauge("baton_attempts_in_progress", "attempts", "Attempts that have not ended")
ATTEMPTS_ENDED = counter("baton_attempts_ended_total", "attempts", "Attempts by how they ended", "outcome")
QUEUE_REQUESTS = gauge("baton_prefill_queue_requests", "requests", "Requests queued here", "class")
QUEUE_OLDEST = gauge("baton_prefill_queue_oldest_seconds", "seconds", "How long the first has queued")
ADMITTED_TOKENS = gauge(
    "baton_prefill_admitted_tokens",
    "tokens",
    "Prompt tokens that have left the queue and whose prefill has not ended",
)

# The engine
ENGINE_HEALTHY = gauge("baton_engine_healthy", "0 or 1", "0 once the engine has failed or stands still")
ENGINE_BUSY = gauge("baton_engine_busy_seconds", "seconds", "How long the step in progress has run")
ENGINE_STEPS = counter("baton_engine_steps_total", "steps", "Steps of the engine")
ENGINE_STEP_SECONDS = histogram(
    "baton_engine_step_seconds", "seconds", "Steps, by whether a prompt was in them", STAGE_SECONDS, "kind"
)
ENGINE_STEP_TOKENS = histogram(
    "baton_engine_step_tokens", "tokens", "Tokens computed in a step", TOKEN_COUNTS
)
ENGINE_STEP_REQUESTS = histogram("baton_engine_step_requests", "requests", "Sequences in a step", BATCH_SIZES)
PREFILL_SECONDS = counter("baton_prefill_seconds_total", "seconds", "Seconds in steps with prefill")
DECODE_SECONDS = counter("baton_decode_seconds_total", "seconds", "Seconds in steps of decode only")
PROMPT_TOKENS_COMPUTED = counter(
    "baton_prompt_tokens_computed_total", "tokens", "Prompt tokens computed here"
)
PROMPT_TOKENS_WAITING = gauge("baton_waiting_prefill_tokens", "tokens", "Prompt tokens not computed yet")
PREFILL_CHUNKS = counter("baton_prefill_chunks_total", "chunks", "Chunks of prompts that took several steps")
GENERATION_TOKENS = counter("baton_worker_generation_tokens_total", "tokens", "Tokens sampled here")
DRAFT_STEPS = counter(
    "baton_draft_steps_total",
    "steps",
    "Steps that verified draft tokens, counted for each request in them; 1 + accepted tokens / these is the mean number "
    "of tokens that such a step gives a request",
)
DRAFT_TOKENS = counter("baton_draft_tokens_total", "tokens", "Draft tokens of speculation that were verified")
DRAFT_TOKENS_ACCEPTED = counter(
    "baton_draft_tokens_accepted_total",
    "tokens",
    "Draft tokens that were accepted, because the model drew the same",
)
DRAFT_FAILURES = counter(
    "baton_draft_failures_total",
    "failures",
    "Failures of speculation: each turns it off until the worker restarts",
)
PREFIX_CACHE_QUERIES = counter(
    "baton_worker_prefix_cache_queries_total", "tokens", "Prompt tokens looked up in the prefix cache"
)
PREFIX_CACHE_HITS = counter(
    "baton_worker_prefix_cache_hits_total", "tokens", "Prompt tokens found in the prefix cache"
)
RESERVATIONS_EVICTED = counter(
    "baton_reservations_evicted_total", "reservations", "Reservations given up for running requests"
)
PREEMPTIONS = counter("baton_preemptions_total", "sequences", "Sequences preempted")
RESIDENT_TOKENS = gauge("baton_resident_tokens", "tokens", "Tokens whose KV running sequences hold")
KV_BLOCKS = gauge("baton_kv_blocks", "blocks", "KV blocks of the pool")
KV_BLOCKS_FREE = gauge("baton_kv_blocks_free", "blocks", "KV blocks free or only cached")
KV_USAGE = gauge("baton_kv_cache_usage_ratio", "ratio", "Share of KV blocks in use")

# Hand-offs, at the prefill worker's end
HANDOFFS_SENDING = Gauge(_PREFILL, "baton_handoffs_sending", "hand-offs", "Hand-offs on their way from here")
HANDOFFS_STARTED = Counter(
    _PREFILL,
    "baton_handoffs_started_total",
    "hand-offs",
    "Hand-offs for which a decode worker reserved blocks",
)
HANDOFFS_SENT = Counter(
    _PREFILL, "baton_handoffs_sent_total", "hand-offs", "Hand-offs that a decode worker committed"
)
HANDOFFS_DENIED = Counter(
    _PREFILL,
    "baton_handoffs_denied_total",
    "hand-offs",
    "Reservations that decode workers refused to this worker",
)
HANDOFF_EXPOSED = Distribution(
    _PREFILL, "baton_handoff_exposed_seconds", "seconds", "From prefill's end to the last part", STAGE_SECONDS
)
HANDOFF_LINKS = Gauge(_PREFILL, "baton_handoff_links", "streams", "Streams to decode workers", "transport")
KV_SENT_BYTES = Counter(_PREFILL, "baton_kv_sent_bytes_total", "bytes", "KV handed over", "transport")
KV_PARTS_SENT = Counter(_PREFILL, "baton_kv_parts_sent_total", "parts", "Parts sent")
KV_PARTS_RESENT = Counter(_PREFILL, "baton_kv_parts_resent_total", "parts", "Parts sent again")
KV_STAGING = Gauge(_PREFILL, "baton_kv_staging_bytes", "bytes", "Send staging")
KV_STAGING_USED = Gauge(_PREFILL, "baton_kv_staging_used_bytes", "bytes", "Send staging in use")

# Hand-offs, at the decode worker's end
HANDOFFS_RECEIVING = Gauge(
    _DECODE, "baton_handoffs_receiving", "hand-offs", "Hand-offs reserved here or on their way"
)
HANDOFFS_COMMITTED = Counter(
    _DECODE, "baton_handoffs_committed_total", "hand-offs", "Hand-offs committed here"
)
HANDOFFS_ABORTED = Counter(_DECODE, "baton_handoffs_aborted_total", "hand-offs", "Hand-offs aborted")
HANDOFFS_REFUSED = Counter(
    _DECODE, "baton_handoffs_refused_total", "hand-offs", "Reservations that this worker refused"
)
HANDOFF_SECONDS = Distribution(
    _DECODE, "baton_handoff_seconds", "seconds", "From Reserve to the commit", STAGE_SECONDS
)
HANDOFFS_EXHAUSTED = Gauge(
    _DECODE, "baton_handoffs_exhausted", "0 or 1", "1 once too much of the ring is in doubt"
)
KV_RECEIVED_BYTES = Counter(_DECODE, "baton_kv_received_bytes_total", "bytes", "KV bytes received")
KV_PARTS_VERIFIED = Counter(_DECODE, "baton_kv_parts_verified_total", "parts", "Parts received and verified")
KV_PARTS_DROPPED = Counter(_DECODE, "baton_kv_parts_dropped_total", "parts", "Parts dropped", "reason")
KV_DIGEST_FAILURES = Counter(
    _DECODE, "baton_kv_digest_failures_total", "parts", "Parts that arrived corrupted"
)
TRANSFER_RATE = Gauge(_DECODE, "baton_transfer_rate_bytes_per_second", "bytes per second", "Measured KV rate")
RING_SLOTS = Gauge(_DECODE, "baton_ring_slots", "slots", "Landing slots")
RING_SLOTS_BY_STATE = Gauge(_DECODE, "baton_ring_slots_by_state", "slots", "Landing slots", "state")
RING_SLOTS_FREE = Gauge(_DECODE, "baton_ring_slots_free", "slots", "Landing slots free")
RING_SLOTS_QUARANTINED = Gauge(_DECODE, "baton_ring_slots_quarantined", "slots", "Landing slots in doubt")
RING_PARTS_WAITING = Gauge(_DECODE, "baton_ring_parts_waiting", "parts", "Parts that wait for a slot")
