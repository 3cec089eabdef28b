"""Fleets that are written straight into the script's sorted sets, without leases."""

from __future__ import annotations

from dataclasses import replace
from itertools import count

import redis

from cluster.config.worker import Role
from cluster.membership.facts import group_id, pack
from cluster.membership.topology import Location
from cluster.membership.types import WorkerInfo
from router.placement.candidates import Heads
from router.placement.keys import PlacementKeys
from router.placement.place_script import Decision, script_source
from tests.harness.place_call import PlaceCall, decision
from tests.router.placement.regret import FILL

INFO = WorkerInfo("", 1, 0, "prefill", "m", "h:1", "", b"", "", "h", 4096, 10_000)
COUNT = 41  # of each role
ROLES: tuple[Role, Role] = ("prefill", "decode")


def worker(role: Role, number: int) -> WorkerInfo:
    """Alone on its host."""
    slot = 1 + number + COUNT * ROLES.index(role)
    host = Location(host=f"{role}-{number}")
    return replace(INFO, worker_id=f"{role}-{number}", role=role, slot=slot, location=host, place=host.place)


class Fleet:
    """Workers in Redis, and placements of one router among them, one after the other."""

    def __init__(self, client: redis.Redis, call: PlaceCall):
        self.client = client
        self.call = call
        self.keys = PlacementKeys(call.namespace, call.router).place(1)
        self.numbers = count(1)

    def fill(self, workers: list[WorkerInfo]) -> None:
        """Each with as many tokens as its number says."""
        loads = [int(one.worker_id.split("-")[1]) for one in workers]
        parts = (
            (one.name, load, load, pack(one), one.slot) for one, load in zip(workers, loads, strict=True)
        )
        self.client.eval(FILL, 0, f"{{{self.call.namespace}}}:", *(part for one in parts for part in one))

    def place(self, passed: list[str] | None = None) -> tuple[str, str]:
        """The ids of the chosen pair."""
        heads = Heads(
            *(group_id("m", 16, b""), "m"), prefill=True, without_prefill=[], without_decode=passed or []
        )
        number = next(self.numbers)
        call = replace(self.call, transfer_id=b"%d" % number)
        arguments = call.arguments(1, number, heads)
        found = decision(self.client.eval(script_source(), len(self.keys), *self.keys, *arguments))
        assert isinstance(found, Decision)
        return found.prefill.split("@")[0], found.decode.split("@")[0]

    def sets_read(self) -> int:
        """By one placement."""
        before = self.client.info("commandstats")["cmdstat_zrange"]["calls"]
        self.place()
        return int(self.client.info("commandstats")["cmdstat_zrange"]["calls"] - before)
