"""A simulated cluster that is scaled like a real one and publishes the status of real workers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from baton.autoscaler.decision import PoolObservation, WorkerSample
from bench.autoscaling import kernel
from bench.autoscaling.day import Requests
from bench.autoscaling.kernel import ABSENT, DRAINING, READY, SLOTS, STARTING
from bench.autoscaling.service_times import ServiceTimes
from cluster.config.worker import Role
from cluster.membership.status import BOUNDS_SECONDS, WorkerStatus

SLICE_SECONDS = 0.25
WITHIN = tuple(f"first_tokens_within_{bound:g}s" for bound in BOUNDS_SECONDS)
FIELDS = {
    "arrived_requests": "arrived_requests",
    "arrived_tokens": "arrived_prompt_tokens",
    "computed_tokens": "prompt_tokens_computed",
    "prefill_seconds": "prefill_seconds",
    "output_tokens": "output_tokens",
    "steps": "steps",
    "step_seconds": "decode_seconds",
}


@dataclass(frozen=True)
class Outcome:
    """Result of each request: seconds to the first token, and mean seconds between tokens (0: only one)."""

    ttft: np.ndarray[Any, np.dtype[np.float64]]
    itl: np.ndarray[Any, np.dtype[np.float64]]
    gpu_hours: float

    def met(self, ttft_seconds: float, itl_seconds: float) -> np.ndarray[Any, np.dtype[np.bool_]]:
        return (self.ttft <= ttft_seconds) & (self.itl <= itl_seconds)

    def attainment(self, ttft_seconds: float, itl_seconds: float) -> float:
        return float(np.mean(self.met(ttft_seconds, itl_seconds)))


class SimulatedCluster:
    def __init__(
        self, requests: Requests, times: ServiceTimes, startup_seconds: float, gpus: tuple[int, int] = (1, 1)
    ):
        """`gpus`: per prefill replica and per decode replica."""
        self.now = 0.0
        self._times = times
        self._startup = startup_seconds
        self._gpus = gpus
        self._work = kernel.make_work(requests.arrival, requests.prompt, requests.output)
        buckets = len(BOUNDS_SECONDS) + 1
        self._pools: dict[Role, kernel.Pool] = {
            "prefill": kernel.make_pool(buckets),
            "decode": kernel.make_pool(buckets),
        }
        self._life = {role: np.zeros(SLOTS, np.int64) for role in self._pools}
        self._targets: dict[Role, int] = {"prefill": 0, "decode": 0}

    def start(self, role: Role, replicas: int) -> None:
        """Replicas at the beginning of the day; they are ready at once."""
        self._pools[role].state[:replicas] = READY
        self._targets[role] = replicas

    def scale(self, role: Role, replicas: int) -> None:
        """Scale as a platform does: newest first when it shrinks; replicas that still start are removed at once."""
        pool, life = self._pools[role], self._life[role]
        active = np.flatnonzero((pool.state == STARTING) | (pool.state == READY))
        if len(active) < replicas:
            for w in np.flatnonzero(pool.state == ABSENT)[: replicas - len(active)]:
                self._reset(pool, int(w))
                life[w] += 1
        order = sorted(active, key=lambda w: (pool.state[w] == STARTING, pool.ready_at[w], w))
        for w in order[replicas:]:
            pool.state[w] = DRAINING if pool.state[w] == READY else ABSENT
        self._targets[role] = replicas

    def _reset(self, pool: kernel.Pool, w: int) -> None:
        for values in pool:
            values[w] = 0
        pool.state[w] = STARTING
        pool.ready_at[w] = self.now + self._startup

    def run(self, until: float) -> None:
        t = self._times
        kernel.advance(
            self._work,
            self._pools["prefill"],
            self._pools["decode"],
            self.now,
            until,
            SLICE_SECONDS,
            np.array(
                [
                    t.prefill_token_seconds,
                    t.prefill_token_pair_seconds,
                    t.step_base_seconds,
                    t.step_sequence_seconds,
                    t.step_resident_token_seconds,
                ]
            ),
            t.kv_tokens,
            np.array(BOUNDS_SECONDS),
        )
        self.now = until

    def finish(self, limit_seconds: float = 3600.0) -> Outcome:
        """Run until no request waits."""
        end = self.now + limit_seconds
        while np.isinf(self._work.finished).any() and self.now < end:
            self.run(self.now + 10.0)
        return self.outcome()

    def outcome(self) -> Outcome:
        work = self._work
        gaps = np.maximum(work.output - 1, 1)
        done = np.isfinite(work.finished)
        spent = np.subtract(work.finished, work.first_token, where=done, out=np.full(len(done), np.inf))
        itl = np.where(work.output > 1, spent / gaps, 0.0)
        gpu_seconds = float(work.gpu_seconds @ np.array(self._gpus, dtype=np.float64))
        return Outcome(work.first_token - work.arrival, itl, gpu_seconds / 3600)

    @property
    def waiting(self) -> int:
        """Requests that no worker has taken yet, or whose KV has no place."""
        return int(self._work.count[0] + self._work.count[2])

    def late(self, ttft_seconds: float, itl_seconds: float) -> int:
        """Number of requests that are done and missed an objective."""
        done = np.isfinite(self._work.finished)
        return int((done & ~self.outcome().met(ttft_seconds, itl_seconds)).sum())

    def gpus_held(self) -> int:
        held = [int((pool.state != ABSENT).sum()) for pool in self._pools.values()]
        return held[0] * self._gpus[0] + held[1] * self._gpus[1]

    def replicas(self, role: Role) -> int:
        """Replicas that serve now."""
        return int((self._pools[role].state == READY).sum())

    def workers(self, role: Role) -> tuple[WorkerSample, ...]:
        """Status of the replicas that serve or drain."""
        state = self._pools[role].state
        return tuple(
            self._sample(role, int(w)) for w in np.flatnonzero((state == READY) | (state == DRAINING))
        )

    def observe(self, role: Role, workers: tuple[WorkerSample, ...]) -> PoolObservation:
        """The platform's present facts, with the `workers` of an earlier time."""
        state = self._pools[role].state
        return PoolObservation(
            target=self._targets[role],
            ready=int((state == READY).sum()),
            draining=int((state == DRAINING).sum()),
            workers=workers,
        )

    def _sample(self, role: Role, w: int) -> WorkerSample:
        """Read through the fields that workers publish."""
        pool = self._pools[role]
        status: dict[str, float] = {name: float(getattr(pool, of)[w]) for of, name in FIELDS.items()}
        if role == "prefill":
            status["queued_prefill_tokens"] = float(pool.load[w])
            within = np.cumsum(pool.first_tokens[w]).tolist()
            status.update(zip(WITHIN, within, strict=False))
            status["first_tokens"] = within[-1]
        else:
            status["running"] = float(pool.batch[w])
            status["kv_usage_ratio"] = float(pool.load[w]) / self._times.kv_tokens
        return WorkerSample(f"{role}-{w}@{self._life[role][w]}", WorkerStatus.decode(status))
