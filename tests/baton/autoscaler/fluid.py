"""Two pools as fluids: steady rates flow through replicas of known speed, so the right number is known."""

from __future__ import annotations

from dataclasses import dataclass, field

from baton.autoscaler.config import AutoscalingConfig
from baton.autoscaler.decision import Decision, Observation, PoolObservation, WorkerSample
from baton.autoscaler.policy import decide
from baton.autoscaler.state import PolicyState
from cluster.config.worker import ROLES, Role
from cluster.membership.status import BOUNDS_SECONDS, WorkerStatus

PROMPT, OUTPUT = 1000.0, 200.0  # tokens
PREFILL_TOKENS_PER_SECOND = 1000.0  # of a replica: one request a second
STEP_BASE, STEP_EACH = 0.010, 0.001  # seconds


@dataclass
class Worker:
    name: str
    since: float
    counters: dict[str, float] = field(default_factory=dict)

    def count(self, **amounts: float) -> None:
        for name, amount in amounts.items():
            self.counters[name] = self.counters.get(name, 0.0) + amount


@dataclass
class FluidCluster:
    """`room`: replicas that ever become ready, by pool; requests for more are never met."""

    config: AutoscalingConfig
    room: dict[Role, int] = field(default_factory=dict)
    now: float = 0.0
    queue_tokens: float = 0.0
    targets: dict[Role, int] = field(default_factory=lambda: {"prefill": 1, "decode": 1})
    asked_at: dict[Role, list[float]] = field(default_factory=lambda: {"prefill": [], "decode": []})
    workers: dict[Role, list[Worker]] = field(default_factory=lambda: {"prefill": [], "decode": []})
    state: PolicyState = field(default_factory=PolicyState)
    history: list[Decision] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    _names: int = 0

    def __post_init__(self) -> None:
        for role in ROLES:
            self.targets[role] = max(1, self.config.pool(role).min_replicas)
            self.asked_at[role] = [-1e9] * self.targets[role]

    def run(self, seconds: float, requests_per_second: float) -> None:
        end = self.now + seconds
        while self.now < end:
            self.now += self.config.interval_seconds
            for role in ROLES:
                self._start_and_stop(role)
            self._flow(requests_per_second, self.config.interval_seconds)
            self._decide()

    def targets_since(self, time: float, role: Role) -> list[int]:
        pairs = zip(self.times, self.history, strict=True)
        return [decision.pool(role).target for at, decision in pairs if at >= time]

    def _start_and_stop(self, role: Role) -> None:
        startup = self.config.pool(role).startup_seconds
        usable = self.asked_at[role][: self.room.get(role, 1 << 30)]
        ready = sum(self.now - at >= startup for at in usable)
        pool = self.workers[role]
        while len(pool) < ready:
            self._names += 1
            pool.append(Worker(f"{role}-{self._names}", self.now))
        del pool[ready:]

    def _flow(self, rate: float, seconds: float) -> None:
        prefill, decode = self.workers["prefill"], self.workers["decode"]
        if not prefill or not decode:
            return
        self.queue_tokens += rate * PROMPT * seconds
        done = min(self.queue_tokens, len(prefill) * PREFILL_TOKENS_PER_SECOND * seconds)
        self.queue_tokens -= done
        late = self.queue_tokens / (len(prefill) * PREFILL_TOKENS_PER_SECOND)
        for worker in prefill:
            share = done / len(prefill)
            worker.count(arrived_requests=rate * seconds / len(prefill))
            worker.count(arrived_prompt_tokens=rate * seconds * PROMPT / len(prefill))
            worker.count(prompt_tokens_computed=share, prefill_seconds=share / PREFILL_TOKENS_PER_SECOND)
            worker.count(first_tokens=share / PROMPT)
            for bound in BOUNDS_SECONDS:
                within = share / PROMPT if late + 1.0 <= bound else 0.0
                worker.count(**{f"first_tokens_within_{bound:g}s": within})
        self._decode(decode, done / PROMPT / seconds * OUTPUT, seconds)

    def _decode(self, decode: list[Worker], tokens_per_second: float, seconds: float) -> None:
        """batch = rate · (base + each · batch), up to the largest batch an engine takes."""
        each = tokens_per_second / len(decode)
        batch = min(64.0, each * STEP_BASE / (1 - each * STEP_EACH)) if each * STEP_EACH < 0.95 else 64.0
        for worker in decode:
            if batch <= 0:
                continue
            step = STEP_BASE + STEP_EACH * batch
            worker.count(output_tokens=batch * seconds / step, steps=seconds / step, decode_seconds=seconds)
            worker.counters["running"] = batch

    def _decide(self) -> None:
        queued = self.queue_tokens / max(1, len(self.workers["prefill"]))
        pools = {}
        for role in ROLES:
            gauges = {"queued_prefill_tokens": queued} if role == "prefill" else {}
            pools[role] = PoolObservation(
                target=self.targets[role],
                ready=len(self.workers[role]),
                workers=tuple(
                    WorkerSample(w.name, WorkerStatus.decode({**w.counters, **gauges}))
                    for w in self.workers[role]
                ),
            )
        decision = decide(self.config, self.state, Observation(pools["prefill"], pools["decode"]), self.now)
        self.history.append(decision)
        self.times.append(self.now)
        for one in decision.pools:
            asked = self.asked_at[one.role]
            asked.extend([self.now] * (one.target - len(asked)))
            del asked[one.target :]
            self.targets[one.role] = one.target
