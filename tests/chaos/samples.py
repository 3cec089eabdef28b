"""Memory, descriptors and keys of a cluster's processes and its Redis at one moment."""

from __future__ import annotations

import contextlib
import json
import time
import urllib.request
from dataclasses import dataclass, field
from typing import Any

import psutil
import redis

from tests.chaos.target import ROLES, Target
from tests.harness.redis_text import text_client


@dataclass(frozen=True)
class Sample:
    """By process: its name is its role and pid. `at_rest`: no request ran."""

    seconds: float  # since the first
    at_rest: bool
    rss_bytes: dict[str, int] = field(default_factory=dict)
    fds: dict[str, int] = field(default_factory=dict)
    threads: dict[str, int] = field(default_factory=dict)
    redis_bytes: int = 0
    redis_keys: int = 0
    blocks_held: dict[str, int] = field(default_factory=dict)  # by worker
    slots_in_doubt: int = 0
    slots: int = 0


class Sampler:
    def __init__(self, target: Target):
        self._target = target
        self._began = time.monotonic()
        self.samples: list[Sample] = []

    def sample(self, at_rest: bool = False) -> None:
        sample = Sample(time.monotonic() - self._began, at_rest, **self._processes(), **self._accounts())
        self.samples.append(sample)

    def _processes(self) -> dict[str, Any]:
        state = self._target.state()
        pids = {f"{role} {one['pid']}": one["pid"] for role in ("router", *ROLES) for one in state[role]}
        pids["baton up"] = state["pid"]
        found: dict[str, dict[str, int]] = {"rss_bytes": {}, "fds": {}, "threads": {}}
        for name, pid in pids.items():
            with contextlib.suppress(psutil.Error):
                process = psutil.Process(pid)
                found["rss_bytes"][name] = process.memory_info().rss
                found["fds"][name] = process.num_fds()
                found["threads"][name] = process.num_threads()
        return found

    def _accounts(self) -> dict[str, Any]:
        """Of Redis and of the workers; what can't be asked now (a stopped Redis) is left out."""
        found: dict[str, Any] = {}
        with contextlib.suppress(redis.RedisError):
            client = text_client(self._target.redis_url, 0.5)
            try:
                found["redis_bytes"] = int(client.info("memory")["used_memory"])
                found["redis_keys"] = int(client.dbsize())
            finally:
                client.close()
        with (
            contextlib.suppress(OSError, ValueError),
            urllib.request.urlopen(f"{self._target.http[0]}/v1/cluster", timeout=1.0) as answer,
        ):
            workers = [one for one in json.load(answer)["workers"] if one["lease"] == "live"]
            found["blocks_held"] = {one["id"]: one["status"].get("blocks_held", 0) for one in workers}
            found["slots"] = sum(one["status"].get("ring_slots", 0) for one in workers)
            found["slots_in_doubt"] = sum(one["status"].get("ring_quarantined", 0) for one in workers)
        return found
