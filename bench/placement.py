"""The placement script by itself: its time inside Redis and the memory of its index."""

from __future__ import annotations

import random
import secrets
import struct
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path

import redis

from cluster.config.worker import Role
from cluster.index import scripts
from cluster.membership import keys
from cluster.membership.types import WorkerInfo
from cluster.redis.embedded import EmbeddedRedis
from router.placement.candidates import Candidates
from router.placement.keys import PlacementKeys
from router.placement.place_script import script_source

NAMESPACE, MODEL_ID, PAGE = "bench", "m", 16
KEY_BYTES = 8
PLACES = 8
SYSTEM_PROMPTS, SYSTEM_BLOCKS = 20, 16
SLOWER_THAN_MICROSECONDS = 15  # the log holds scripts, not the commands inside them
TTL_MS, PREDICT_MS = 3_600_000, 10_000
BANDWIDTHS = struct.pack(">5d", *[1e10] * 5)  # the same at every topological distance


@dataclass
class Fleet:
    """Workers of both roles that exist only in the index; every prefill worker before every decode worker."""

    client: redis.Redis
    pairs: int
    rng: random.Random
    sequence: dict[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        roles: tuple[Role, Role] = ("prefill", "decode")
        self.workers = [self._worker(role, n, slot) for slot, (role, n) in enumerate(self._names(roles), 1)]
        self.candidates = Candidates(self.workers[: self.pairs], self.workers[self.pairs :], "never")
        self.tag = f"{{{NAMESPACE}}}:"
        self.prefix = scripts.prefix(NAMESPACE, MODEL_ID)
        self._place = self.client.register_script(script_source())
        self._report = self.client.register_script(scripts.report())
        self._numbers = count(1)
        for worker in self.workers:
            self.client.hset(keys.slot_owners(NAMESPACE), str(worker.slot), worker.name)

    def _names(self, roles: tuple[Role, Role]) -> list[tuple[Role, int]]:
        return [(role, n) for role in roles for n in range(self.pairs)]

    @staticmethod
    def _worker(role: Role, number: int, slot: int) -> WorkerInfo:
        place = f"host-{number % PLACES}"
        name = f"{role}-{number}"
        return WorkerInfo(
            name, secrets.randbits(64), slot, role, MODEL_ID, "", "", b"", place, place, 131072, 65536
        )

    def load_everybody(self) -> None:
        """Load every worker, as in a busy cluster."""
        self.client.hset(self.tag + "load", "", "0" * 65)
        for index, worker in enumerate(self.candidates.workers):
            kind = "p:" if index < self.pairs else "d:"
            self.client.hset(self.tag + "load", kind + worker.name, str(self.rng.randrange(1, 8000)))

    def place(self, chain: bytes) -> tuple[WorkerInfo, WorkerInfo]:
        tokens = len(chain) // KEY_BYTES * PAGE + 5
        answer = self._place(
            keys=PlacementKeys(NAMESPACE, "router").place(1),
            args=[
                *(self.prefix, "router", chain, tokens, PAGE, 256, "never", self.rng.random()),
                *(
                    1e-4,
                    1e-9,
                    32768.0,
                    struct.pack(">5d", *[1e10] * 5),
                    2e-8,
                    "hybrid",
                    TTL_MS,
                    PREDICT_MS,
                    1e4,
                    "normal",
                    0,
                    0,
                ),
                *(1, next(self._numbers), TTL_MS, secrets.token_bytes(16)),
                *self.candidates.arguments,
            ],
        )
        workers = self.candidates.workers
        return workers[int(answer[0]) - 1], workers[int(answer[1]) - 1]

    def report(self, worker: WorkerInfo, chain: bytes) -> None:
        """Report that the worker holds the whole chain."""
        number = self.sequence.get(worker.slot, 1)
        self.sequence[worker.slot] = number + 1
        self._report(
            keys=[keys.slot_owners(NAMESPACE), keys.sequences(NAMESPACE)],
            args=[self.prefix, worker.slot, worker.name, number, TTL_MS, len(chain) // KEY_BYTES, chain],
        )


def script_seconds(directory: Path, pairs: int, blocks: int, calls: int) -> list[float]:
    """Seconds of each call inside Redis: chains of about `blocks` blocks, most of them indexed, all workers loaded."""
    server = EmbeddedRedis.start(directory)
    client = redis.Redis.from_url(server.url)
    try:
        rng = random.Random(0)
        fleet = Fleet(client, pairs, rng)
        systems = [rng.randbytes(SYSTEM_BLOCKS * KEY_BYTES) for _ in range(SYSTEM_PROMPTS)]
        known = blocks - SYSTEM_BLOCKS - 4
        chains = [
            rng.choice(systems) + rng.randbytes(known * KEY_BYTES) for _ in range(min(400, 400_000 // blocks))
        ]
        for chain in chains:
            for worker in (rng.choice(fleet.workers[:pairs]), rng.choice(fleet.workers[pairs:])):
                fleet.report(worker, chain)
        fleet.load_everybody()
        client.config_set("slowlog-max-len", 4 * calls)
        for number in range(calls + calls // 4):
            if number == calls // 4:
                client.config_set("slowlog-log-slower-than", SLOWER_THAN_MICROSECONDS)
                client.slowlog_reset()
            fleet.place(rng.choice(chains) + rng.randbytes(4 * KEY_BYTES))
        return [
            e["duration"] / 1e6 for e in client.slowlog_get(4 * calls) if e["command"].startswith(b"EVALSHA")
        ]
    finally:
        client.close()
        server.stop()


def bytes_per_block(directory: Path, requests: int) -> float:
    """Growth of Redis's memory per distinct block, after conversations of many turns."""
    server = EmbeddedRedis.start(directory)
    client = redis.Redis.from_url(server.url)
    try:
        rng = random.Random(0)
        fleet = Fleet(client, 8, rng)
        systems = [rng.randbytes(SYSTEM_BLOCKS * KEY_BYTES) for _ in range(SYSTEM_PROMPTS)]
        talks = [rng.choice(systems) for _ in range(max(1, requests // 20))]
        fleet.place(b"")
        before, blocks = int(client.info("memory")["used_memory"]), len(systems) * SYSTEM_BLOCKS
        for _ in range(requests):
            number = rng.randrange(len(talks))
            # A question, then an answer that the workers report once it is complete.
            question, answer = rng.randrange(4, 40), rng.randrange(4, 28)
            chain = talks[number] + rng.randbytes(question * KEY_BYTES)
            prefill, decode = fleet.place(chain)
            fleet.report(prefill, chain)
            talks[number] = chain + rng.randbytes(answer * KEY_BYTES)
            fleet.report(decode, talks[number])
            blocks += question + answer
        return (int(client.info("memory")["used_memory"]) - before) / blocks
    finally:
        client.close()
        server.stop()
