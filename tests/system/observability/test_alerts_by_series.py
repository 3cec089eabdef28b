"""Alerts whose causes take too long, or cannot be brought about here: series under their live names and labels, and
the rules as they are shipped, unhurried."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.system.observability.conftest import Watched
from tests.system.observability.debian_prometheus import Prometheus, promtool
from tests.system.observability.rules import alert_files, alerts

pytestmark = pytest.mark.system

GOOD_MINUTES, BAD_MINUTES = 12, 30
STEPS_A_MINUTE = 2
Labels = dict[str, str]


@dataclass(frozen=True)
class Fault:
    """What a series does while all is well, and then: a gauge's value, or a counter's increase every 30 s."""

    good: float
    bad: float
    is_counter: bool = False


def _slow(seconds: float) -> Callable[[Labels], Fault]:
    """Of a histogram's buckets: observations that all take longer than `seconds`, after some that take no time."""

    def fault(labels: Labels) -> Fault:
        bound = math.inf if labels["le"] == "+Inf" else float(labels["le"])
        return _counter(10, 10 if bound > seconds else 0)

    return fault


def _gauge(good: float, bad: float) -> Fault:
    return Fault(good, bad)


def _counter(good: float, bad: float) -> Fault:
    return Fault(good, bad, is_counter=True)


# Alert → the series it needs: a selector of live series, and what each does.
CASES: dict[str, dict[str, Fault | Callable[[Labels], Fault]]] = {
    "BatonSlowFirstToken": {"baton_time_to_first_token_seconds_bucket": _slow(5)},
    "BatonSlowTokens": {"baton_inter_token_latency_seconds_bucket": _slow(0.5)},
    "BatonHandoffSlow": {"baton_handoff_exposed_seconds_bucket": _slow(1)},
    "BatonPlacementSlow": {'baton_redis_call_seconds_bucket{call="place"}': _slow(0.05)},
    "BatonRedisMemory": {
        "baton_redis_memory_used_bytes": _gauge(100, 800),
        "baton_redis_memory_max_bytes": _gauge(1000, 1000),
    },
    "BatonIndexDown": {"baton_worker_index_up": _gauge(1, 0)},
    "BatonRedisEviction": {
        "baton_redis_evicts_index_only": _gauge(1, 0),
        "baton_router_redis_up": _gauge(1, 1),
    },
    "BatonEventLoopLate": {
        "baton_event_loop_lag_seconds_sum": _counter(0.1, 12),
        "baton_event_loop_lag_seconds_count": _counter(60, 60),
    },
    "BatonCertificateExpires": {
        'baton_certificate_expires_seconds{certificate="tls_cert"}': _gauge(90 * 86400, 13 * 86400)
    },
    "BatonRouterProcessesRestart": {"baton_process_restarts_total": _counter(0, 1)},
    "BatonTenantThrottled": {
        'baton_tenant_requests_total{result="ok"}': _counter(10, 10),
        'baton_tenant_requests_total{result="refused"}': _counter(0, 30),
    },
    "BatonEngineStalled": {"baton_engine_healthy": _gauge(1, 0)},
    "BatonEngineStepSlow": {"baton_engine_busy_seconds": _gauge(0.1, 12)},
    "BatonWorkerDrainsLong": {"baton_worker_draining": _gauge(0, 1)},
    "BatonPrefillQueueOld": {"baton_prefill_queue_oldest_seconds": _gauge(1, 25)},
    "BatonKvCacheFull": {'baton_kv_cache_usage_ratio{role="decode"}': _gauge(0.5, 0.99)},
    "BatonPreemptions": {"baton_preemptions_total": _counter(0, 6)},
    "BatonDigestFailures": {"baton_kv_digest_failures_total": _counter(0, 1)},
    "BatonRingInDoubt": {
        "baton_ring_slots_quarantined": _gauge(0, 8),
        "baton_ring_slots": _gauge(16, 16),
    },
    "BatonRingExhausted": {"baton_handoffs_exhausted": _gauge(0, 1)},
    "BatonHandoffsRefused": {
        "baton_handoffs_committed_total": _counter(10, 10),
        "baton_handoffs_refused_total": _counter(0, 10),
    },
    "BatonAutoscalingShort": {
        "baton_autoscaling_needed_replicas": _gauge(2, 3),
        "baton_autoscaling_desired_replicas": _gauge(2, 2),
        "baton_autoscaling_leader": _gauge(1, 1),
    },
    "BatonAutoscalingStopped": {"baton_autoscaling_decisions_total": _counter(3, 0)},
}
# Further causes of alerts that are in CASES.
ALSO: list[tuple[str, dict[str, Fault | Callable[[Labels], Fault]]]] = [
    (
        "BatonRedisMemory",
        {
            "baton_index_memory_used_bytes": _gauge(100, 800),
            "baton_index_memory_max_bytes": _gauge(1000, 1000),
        },
    ),
    (
        "BatonRedisEviction",
        {"baton_index_evicts_index_only": _gauge(1, 0), "baton_router_index_up": _gauge(1, 1)},
    ),
]
BY_CAUSE = {
    *("BatonRouterAbsent", "BatonNoDecodeWorker", "BatonNoPrefillWorker", "BatonWorkerLost"),
    *("BatonRouterSaturated", "BatonRequestsRefused", "BatonRequestsFailing", "BatonAttemptsRetried"),
    *("BatonRedisDown", "BatonPlacementWithoutRedis", "BatonWorkerFenced", "BatonFallbackTransport"),
}


def test_every_alert_is_tested() -> None:
    assert set(CASES) | BY_CAUSE == {rule["alert"] for rule in alerts()}


def test_each_fires_when_its_series_turn_bad(healthy: Watched, tmp_path: Path) -> None:
    file = tmp_path / "alerts.test.yml"
    file.write_text(yaml.safe_dump(_tests(healthy.prometheus)))
    assert "SUCCESS" in promtool("test", "rules", str(file))


def test_an_autoscaler_that_is_gone_with_its_series_is_noticed(tmp_path: Path) -> None:
    firing = 'count(ALERTS{alertname="BatonAutoscalingStopped", alertstate="firing"}) > bool 0'
    gone = {
        "interval": "1m",
        "input_series": [
            {"series": 'baton_autoscaling_decisions_total{namespace="n"}', "values": "0+4x90 _x120"}
        ],
        "promql_expr_test": [
            {"expr": firing, "eval_time": "89m", "exp_samples": []},
            {"expr": firing, "eval_time": "115m", "exp_samples": [{"labels": "{}", "value": 1}]},
            {"expr": firing, "eval_time": "180m", "exp_samples": []},
        ],
    }
    file = tmp_path / "gone.test.yml"
    files = [str(path) for path in alert_files()]
    file.write_text(yaml.safe_dump({"rule_files": files, "evaluation_interval": "30s", "tests": [gone]}))
    assert "SUCCESS" in promtool("test", "rules", str(file))


def _tests(prometheus: Prometheus) -> dict[str, Any]:
    tests = []
    for alert, faults in [*CASES.items(), *ALSO]:
        series = [one for selector, fault in faults.items() for one in _series(prometheus, selector, fault)]
        firing = f'count(ALERTS{{alertname="{alert}", alertstate="firing"}}) > bool 0'
        tests.append(
            {
                "name": alert,
                "interval": "30s",
                "input_series": series,
                "promql_expr_test": [
                    {"expr": firing, "eval_time": f"{GOOD_MINUTES - 1}m", "exp_samples": []},
                    {
                        "expr": firing,
                        "eval_time": f"{GOOD_MINUTES + BAD_MINUTES - 1}m",
                        "exp_samples": [{"labels": "{}", "value": 1}],
                    },
                ],
            }
        )
    files = [str(path) for path in alert_files()]
    return {"rule_files": files, "evaluation_interval": "30s", "tests": tests}


def _series(
    prometheus: Prometheus, selector: str, fault: Fault | Callable[[Labels], Fault]
) -> list[dict[str, str]]:
    """One for every live series of the selector, with all its labels."""
    found = prometheus.series(selector)
    assert found, f"no process exports {selector}"
    made = []
    for labels in found:
        chosen = fault if isinstance(fault, Fault) else fault(labels)
        name = labels["__name__"]
        shown = ", ".join(f'{key}="{value}"' for key, value in labels.items() if key != "__name__")
        made.append({"series": f"{name}{{{shown}}}", "values": _values(chosen)})
    return made


def _values(fault: Fault) -> str:
    good, bad = GOOD_MINUTES * STEPS_A_MINUTE, BAD_MINUTES * STEPS_A_MINUTE
    if not fault.is_counter:
        return f"{fault.good}+0x{good} {fault.bad}+0x{bad}"
    reached = fault.good * (good + 1)
    return f"0+{fault.good}x{good} {reached}+{fault.bad}x{bad}"
