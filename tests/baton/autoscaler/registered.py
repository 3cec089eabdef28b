"""Workers that only register and publish a status set by the test."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from cluster.config.worker import Role
from cluster.membership.registration import Registration
from cluster.membership.status import WorkerStatus
from cluster.membership.types import WorkerInfo
from worker.request_counts import RequestCounts


class RegisteredWorker:
    def __init__(self, redis_url: str, namespace: str, role: Role, name: str, model: str = ""):
        info = WorkerInfo(
            worker_id=name,
            epoch=1,
            slot=0,
            role=role,
            model_id="m",
            address="127.0.0.1:1",
            metrics_address="127.0.0.1:2",
            layout=b"",
            place="",
            host="here",
            max_model_len=4096,
            blocks_total=100,
            served_model=model,
        )
        self._status = WorkerStatus()
        self.registration = Registration(redis_url, namespace, info, status=lambda: self._status)

    def publish(self, **status: Any) -> None:
        """At once."""
        self._status = replace(RequestCounts().onto(WorkerStatus()), **status)
        self.registration.register_again()


def prefill_status(now: float, requests_per_second: float) -> dict[str, float]:
    """A replica that computes 1,000 tokens a second and gets prompts of 1,000 tokens; the rest queues."""
    done = min(now * requests_per_second, now)
    return {
        "queued_prefill_tokens": max(0.0, now * requests_per_second - done) * 1000,
        "arrived_requests": now * requests_per_second,
        "arrived_prompt_tokens": now * requests_per_second * 1000,
        "prompt_tokens_computed": done * 1000,
        "prefill_seconds": done,
    }


def decode_status(now: float, batch: float) -> dict[str, float]:
    step = 0.01 + 0.001 * batch
    return {
        "running": batch,
        "output_tokens": batch * now / step,
        "steps": now / step,
        "decode_seconds": now,
        "kv_usage_ratio": batch / 64,
    }
