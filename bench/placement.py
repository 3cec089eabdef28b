"""The placement script by itself: its time inside Redis and the memory of its index."""

from __future__ import annotations

import random
import secrets
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path

import redis

from cluster.config.worker import Role
from cluster.index import scripts
from cluster.membership import keys
from cluster.membership.facts import pack
from cluster.membership.scripts import SETS
from cluster.membership.topology import Location
from cluster.membership.types import WorkerInfo
from cluster.redis.embedded import EmbeddedRedis
from router.placement.eligibility import Eligibility
from router.placement.keys import PlacementKeys
from router.placement.kv_groups import kv_group_of
from router.placement.place_script import Decision, script_source
from router.placement.settlement import settle_source
from router.placement.types import PlacementRequest
from tests.harness.place_call import PlaceCall, decision

NAMESPACE, MODEL_ID, PAGE = "bench", "m", 16
KEY_BYTES = 8
SYSTEM_PROMPTS, SYSTEM_BLOCKS = 20, 16
SLOWER_THAN_MICROSECONDS = 15  # the log holds scripts, not the commands inside them
TTL_MS, PREDICT_MS = 3_600_000, 10_000


# Pairs near each other are faster, so that the script reads the candidates of places and racks too.
BANDWIDTHS = (1e11, 5e10, 1e10, 5e9, 5e9)
_ENTER = (
    SETS
    + """
local t = redis.call('TIME')
for i = 2, #ARGV, 3 do
  redis.call('HSET', ARGV[1] .. 'facts', ARGV[i], ARGV[i + 1])
  redis.call('HSET', ARGV[1] .. 'owners', ARGV[i + 2], ARGV[i])
  redis.call('ZADD', ARGV[1] .. 'leases', t[1] * 1000 + 3600000, string.sub(ARGV[i], 1, -18))
  enter(ARGV[1], ARGV[i], ARGV[i + 1])
end
"""
)


@dataclass
class Fleet:
    """Workers of both roles that exist only in Redis; every prefill worker before every decode worker."""

    client: redis.Redis
    pairs: int
    rng: random.Random
    sequence: dict[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        roles: tuple[Role, Role] = ("prefill", "decode")
        self.workers = [self._worker(role, n, slot) for slot, (role, n) in enumerate(self._names(roles), 1)]
        self.by_name = {worker.name: worker for worker in self.workers}
        request = PlacementRequest(b"", b"", 0, 0, kv_group=kv_group_of(self.workers[0]))
        self.candidates = Eligibility(self.workers, "never").for_script(request, listed=False)
        self.tag = f"{{{NAMESPACE}}}:"
        self.prefix = scripts.prefix(NAMESPACE, MODEL_ID)
        self.keys = PlacementKeys(NAMESPACE, "router")
        self._place = self.client.register_script(script_source())
        self._settle = self.client.register_script(settle_source())
        self._report = self.client.register_script(scripts.report())
        self._numbers = count(1)
        self.enter()
        self.run = int(self._settle(keys=self.keys.settle(0), args=["router", TTL_MS, 0, 0, 0, "", 0, 0]))
        self._settled = 0

    def enter(self) -> None:
        """Put all workers among the candidates, with the load that they have."""
        parts = ((one.name, pack(one), one.slot) for one in self.workers)
        self.client.eval(_ENTER, 0, self.tag, *(part for one in parts for part in one))

    def _names(self, roles: tuple[Role, Role]) -> list[tuple[Role, int]]:
        return [(role, n) for role in roles for n in range(self.pairs)]

    @staticmethod
    def _worker(role: Role, number: int, slot: int) -> WorkerInfo:
        where = Location(host=f"host-{number // 8}", rack=f"rack-{number // 32}", zone="zone")
        return WorkerInfo(
            *(f"{role}-{number}", secrets.randbits(64), slot, role, MODEL_ID, "", "", b"", where.host, "pod"),
            *(131072, 65536, PAGE, where),
        )

    def load_all(self) -> None:
        """Load every worker, as in a busy cluster."""
        self.client.hset(self.tag + "load", "", "0" * 65)
        for index, worker in enumerate(self.workers):
            kind = "p:" if index < self.pairs else "d:"
            self.client.hset(self.tag + "load", kind + worker.name, str(self.rng.randrange(1, 8000)))
        self.enter()

    def place(self, chain: bytes, transfer_id: bytes = b"") -> tuple[WorkerInfo, WorkerInfo]:
        call = PlaceCall(
            NAMESPACE,
            MODEL_ID,
            chain=chain,
            tokens=len(chain) // KEY_BYTES * PAGE + 5,
            output=256,
            random=self.rng.random(),
            a=1e-4,
            b=1e-9,
            token_bytes=32768.0,
            bandwidths=BANDWIDTHS,
            per_token=2e-8,
            rate=1e4,
            ttl_ms=TTL_MS,
            predict_ms=PREDICT_MS,
            lease_ms=TTL_MS,
            transfer_id=transfer_id or secrets.token_bytes(16),
        )
        arguments = call.arguments(self.run, next(self._numbers), self.candidates)
        placed = decision(self._place(keys=self.keys.place(self.run), args=arguments))
        assert isinstance(placed, Decision), placed
        return self.by_name[placed.prefill], self.by_name[placed.decode]

    def settle(self, prefilled: list[bytes], released: list[bytes]) -> None:
        self._settled += 1
        head: list[str | bytes | int] = [
            "router",
            TTL_MS,
            self.run,
            self._settled,
            0,
            "",
            len(prefilled),
            len(released),
        ]
        self._settle(keys=self.keys.settle(self.run), args=[*head, *prefilled, *released])

    def report(self, worker: WorkerInfo, chain: bytes) -> None:
        """Report that the worker holds the whole chain."""
        number = self.sequence.get(worker.slot, 1)
        self.sequence[worker.slot] = number + 1
        self._report(
            keys=[keys.slot_owners(NAMESPACE), keys.sequences(NAMESPACE)],
            args=[self.prefix, worker.slot, worker.name, number, TTL_MS, len(chain) // KEY_BYTES, chain],
        )


def script_seconds(directory: Path, pairs: int, blocks: int, calls: int, *, hot: bool = False) -> list[float]:
    """Seconds of each call inside Redis: chains of about `blocks` blocks, most of them indexed, all workers loaded.
    `hot`: every worker holds every system prompt."""
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
        for worker in fleet.workers if hot else []:
            for system in systems:
                fleet.report(worker, system)
        for chain in chains:
            for worker in (rng.choice(fleet.workers[:pairs]), rng.choice(fleet.workers[pairs:])):
                fleet.report(worker, chain)
        fleet.load_all()
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


def settle_seconds(directory: Path, held: int, calls: int) -> list[float]:
    """Seconds of each settling inside Redis: of a router with `held` attempts on 64+64 workers, 5 of which have computed
    their prompt and 5 of which have ended since the last one, as at 100 requests per second."""
    server = EmbeddedRedis.start(directory)
    client = redis.Redis.from_url(server.url)
    try:
        fleet = Fleet(client, 64, random.Random(0))
        ids = [b"%016d" % number for number in range(held + 5 * calls)]
        for transfer_id in ids[:held]:
            fleet.place(b"", transfer_id)
        client.config_set("slowlog-max-len", 2 * calls)
        taken = []
        for number in range(calls):
            for transfer_id in ids[held + 5 * number : held + 5 * number + 5]:
                fleet.place(b"", transfer_id)
            client.slowlog_reset()
            client.config_set("slowlog-log-slower-than", 1)
            fleet.settle(ids[held + 5 * number - 5 : held + 5 * number], ids[5 * number : 5 * number + 5])
            client.config_set("slowlog-log-slower-than", -1)
            taken += [
                e["duration"] / 1e6 for e in client.slowlog_get(9) if e["command"].startswith(b"EVALSHA")
            ]
        return taken
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
