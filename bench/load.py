"""Workloads that several sections share, as configurations of the load generator."""

from __future__ import annotations

import asyncio
from typing import Any

from bench.checkpoint import SHAPE
from loadgen.config import LoadConfig
from loadgen.load import run
from loadgen.report import Report


def tokens_config(target: str, **settings: Any) -> LoadConfig:
    """Prompts of exact lengths, answers of exact lengths."""
    protocol = "http" if target.startswith("http") else "grpc"
    defaults: dict[str, Any] = {
        "protocol": protocol,
        "targets": (target,),
        "prompt_kind": "tokens",
        "vocab_size": SHAPE.vocab - 1,
        "ignore_eos": True,
        "timeout_seconds": 300.0,
    }
    if protocol == "http":
        defaults["extra_body"] = {"return_token_ids": True}
    return LoadConfig(**{**defaults, **settings})


def run_now(config: LoadConfig, may_be_empty: int = 0) -> Report:
    """Raises RuntimeError when requests failed, but for so many answers without text: figures of a failing server mean
    nothing."""
    return checked(asyncio.run(run(config)), may_be_empty)


def checked(report: Report, may_be_empty: int = 0) -> Report:
    empty = min(report.errors.get("no_tokens", 0), may_be_empty)
    if report.failed > empty:
        raise RuntimeError(f"{report.failed} of {report.requests} requests failed: {report.errors}")
    return report
