"""Live views for the tests of drawing."""

from __future__ import annotations

from typing import Any


def worker(name: str, role: str, **more: Any) -> dict[str, Any]:
    return {
        "id": name,
        "role": role,
        "state": "ready",
        "running": 3,
        "waiting": 1,
        "kv_usage_ratio": 0.5,
        "prefix_hit_ratio": 0.25,
        "prompt_tokens_per_second": 512.0,
        "output_tokens_per_second": 61.5,
        "handoffs_per_second": 2.5,
        **more,
    }


def view(*workers: dict[str, Any]) -> dict[str, Any]:
    return {
        "router": "router-1",
        "redis": {"ok": True},
        "now": {
            "requests_in_flight": 7,
            "cached_ratio": 0.61,
            "requests_per_second": 12.34,
            "failed_per_second": 0.0,
            "output_tokens_per_second": 840.0,
            "prompt_tokens_per_second": 5120.0,
            "kv_bytes_per_second": 3 << 20,
            "ttft": {"p50": 0.0241, "p90": 0.051, "p99": 0.1204},
            "itl": {"p50": 0.0081, "p90": None, "p99": 1.5},
        },
        "routers": [
            {
                "id": "router-1",
                "state": "ready",
                "uptime_seconds": 3725.0,
                "requests_in_flight": 7,
                "requests_per_second": 12.34,
                "output_tokens_per_second": 840.0,
            },
            {"id": "router-2", "state": "gone", "uptime_seconds": 5.0, "requests_in_flight": 0},
        ],
        "workers": list(workers)
        or [
            worker("decode-1", "decode", kv_usage_ratio=0.95),
            worker("prefill-1", "prefill", state="draining"),
            worker("decode-2", "decode", state="suspect"),
        ],
        "flows": [
            {
                "from": "prefill-1",
                "to": "decode-1",
                "bytes_per_second": 2 << 20,
                "handoffs_per_second": 2.0,
            },
            {
                "from": "prefill-1",
                "to": "decode-2",
                "bytes_per_second": 1 << 20,
                "handoffs_per_second": 1.0,
            },
        ],
        "history": {
            "interval_seconds": 2.0,
            "ttft_p99": [0.1, 0.2, None, 0.4],
            "requests_per_second": [1, 2],
        },
    }
