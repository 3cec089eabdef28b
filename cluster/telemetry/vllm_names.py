"""vLLM's names of metrics that both have, for dashboards, autoscalers and gateways made for vLLM.

Switched on by `metrics_aliases: vllm`. The aliases carry `model_name`, as vLLM's do.
"""

from __future__ import annotations

from collections.abc import Sequence

from prometheus_client.core import Metric

from cluster.telemetry.metrics import router, worker
from cluster.telemetry.metrics.declaration import Declaration

# vLLM's families (vllm/v1/metrics) and Baton's metric of the same meaning
_NAMES: dict[str, Sequence[Declaration]] = {
    "vllm:num_requests_running": [worker.REQUESTS_RUNNING],
    "vllm:num_requests_waiting": [worker.REQUESTS_WAITING],
    "vllm:kv_cache_usage_perc": [worker.KV_USAGE],
    "vllm:prefix_cache_queries": [worker.PREFIX_CACHE_QUERIES, router.PREFIX_CACHE_QUERIES],
    "vllm:prefix_cache_hits": [worker.PREFIX_CACHE_HITS, router.PREFIX_CACHE_HITS],
    "vllm:num_preemptions": [worker.PREEMPTIONS],
    "vllm:prompt_tokens": [router.PROMPT_TOKENS],
    "vllm:generation_tokens": [worker.GENERATION_TOKENS, router.GENERATION_TOKENS],
    "vllm:time_to_first_token_seconds": [router.TTFT],
    "vllm:inter_token_latency_seconds": [router.ITL],
    "vllm:e2e_request_latency_seconds": [router.E2E],
    "vllm:request_time_per_output_token_seconds": [router.TPOT],
    "vllm:request_prompt_tokens": [router.REQUEST_PROMPT_TOKENS],
    "vllm:request_generation_tokens": [router.REQUEST_GENERATION_TOKENS],
}
VLLM_NAMES = {one.family: name for name, ours in _NAMES.items() for one in ours}
# The stage of baton_stage_seconds → vLLM's histogram of it
STAGES = {
    "prefill_queue": "vllm:request_queue_time_seconds",
    "prefill": "vllm:request_prefill_time_seconds",
    "decode": "vllm:request_decode_time_seconds",
}


def vllm_aliases(metrics: Sequence[Metric], model: str) -> list[Metric]:
    """`model`: of the process, for samples without a label of that name."""
    aliases = []
    for metric in metrics:
        if metric.name in VLLM_NAMES:
            aliases.append(_renamed(metric, VLLM_NAMES[metric.name], model))
        elif metric.name == router.STAGES.family:
            aliases += [_renamed(metric, name, model, stage) for stage, name in STAGES.items()]
    return aliases


def _renamed(metric: Metric, name: str, model: str, stage: str = "") -> Metric:
    alias = Metric(name, metric.documentation, metric.type)
    for sample in metric.samples:
        labels = dict(sample.labels)
        if stage and labels.pop("stage", "") != stage:
            continue
        name_of_model = labels.pop("model", model)
        suffix = sample.name[len(metric.name) :]
        alias.samples.append(
            sample._replace(name=name + suffix, labels={"model_name": name_of_model, **labels})
        )
    return alias
