"""Answers that are none of the registry's scripts', as of a proxy that has lost the order of a connection's answers."""

from __future__ import annotations

from typing import Any

import pytest
import redis

from cluster.membership.registry import Registry
from cluster.membership.status import WorkerStatus
from cluster.membership.types import WorkerInfo

INFO = WorkerInfo("w", 1, 1, "decode", "m", "127.0.0.1:1", "", b"", "", "h", 1, 1)


@pytest.mark.parametrize("answer", [b"OK", b"1", b"exitstay", 1, [], [b"exit"], {}], ids=repr)
def test_no_such_answer_drains_a_worker(
    redis_url: str, namespace: str, monkeypatch: pytest.MonkeyPatch, answer: Any
) -> None:
    """Any text that was not empty was an order to drain, and the worker's process ended."""
    registry = Registry(redis_url, namespace)
    monkeypatch.setattr(registry, "_renew", lambda **call: answer)
    with pytest.raises(redis.InvalidResponse):
        registry.renew(INFO, WorkerStatus())
    registry.close()


@pytest.mark.parametrize("answer", [None, b"OK", b"1", [], True], ids=repr)
def test_no_such_answer_is_a_slot(
    redis_url: str, namespace: str, monkeypatch: pytest.MonkeyPatch, answer: Any
) -> None:
    registry = Registry(redis_url, namespace)
    monkeypatch.setattr(registry, "_register", lambda **call: answer)
    with pytest.raises(redis.InvalidResponse):
        registry.register(INFO, WorkerStatus(), None)
    registry.close()
