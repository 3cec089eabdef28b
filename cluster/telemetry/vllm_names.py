"""vLLM's names for what it measures too, so that its dashboards, autoscalers and gateways read Baton unchanged.

Switched on by `metrics_aliases: vllm`. The aliases carry `model_name`, as vLLM's do.
"""

from __future__ import annotations

from collections.abc import Sequence

from prometheus_client.core import Metric

# Baton's family → vLLM's (vllm/v1/metrics). Counters without their _total.
_NAMES = {
    "baton_requests_running": "vllm:num_requests_running",
    "baton_requests_waiting": "vllm:num_requests_waiting",
    "baton_kv_cache_usage_ratio": "vllm:kv_cache_usage_perc",
    "baton_prefix_cache_queries": "vllm:prefix_cache_queries",
    "baton_prefix_cache_hits": "vllm:prefix_cache_hits",
    "baton_preemptions": "vllm:num_preemptions",
    "baton_prompt_tokens": "vllm:prompt_tokens",
    "baton_generation_tokens": "vllm:generation_tokens",
    "baton_time_to_first_token_seconds": "vllm:time_to_first_token_seconds",
    "baton_inter_token_latency_seconds": "vllm:inter_token_latency_seconds",
    "baton_e2e_request_latency_seconds": "vllm:e2e_request_latency_seconds",
    "baton_request_time_per_output_token_seconds": "vllm:request_time_per_output_token_seconds",
    "baton_request_prompt_tokens": "vllm:request_prompt_tokens",
    "baton_request_generation_tokens": "vllm:request_generation_tokens",
}
# baton_stage_seconds{stage=…} → vLLM's one histogram per stage
_STAGES = {
    "prefill_queue": "vllm:request_queue_time_seconds",
    "prefill": "vllm:request_prefill_time_seconds",
    "decode": "vllm:request_decode_time_seconds",
}


def vllm_aliases(metrics: Sequence[Metric], model: str) -> list[Metric]:
    aliases = []
    for metric in metrics:
        if metric.name in _NAMES:
            aliases.append(_renamed(metric, _NAMES[metric.name], model))
        elif metric.name == "baton_stage_seconds":
            aliases += [_renamed(metric, name, model, stage) for stage, name in _STAGES.items()]
    return aliases


def _renamed(metric: Metric, name: str, model: str, stage: str = "") -> Metric:
    alias = Metric(name, metric.documentation, metric.type)
    for sample in metric.samples:
        labels = dict(sample.labels)
        if stage and labels.pop("stage", "") != stage:
            continue
        suffix = sample.name[len(metric.name) :]
        alias.samples.append(sample._replace(name=name + suffix, labels={"model_name": model, **labels}))
    return alias
