"""Queries of a decode worker to the API about slots in doubt: their times, their pods, and the slots that an answer
frees."""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import pytest
import redis

from cluster.errors import UnavailableError
from cluster.kubernetes.pod import Pod
from decode_worker.quarantine_watch import GRACE_SECONDS, QUERY_SECONDS, QuarantineWatch
from kv_transfer.decode_side.ring import IncomingPart, Ring, SlotState

POD = Pod("default", "prefill-0", "uid-1", "worker", "node-1", 100.0)


@dataclass(frozen=True)
class Link:
    name: str


class World:
    """A ring with fake API, registry and clock."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.ring = Ring(list(range(16)), lambda part, slot: None)
        self.asked: list[Pod] = []
        self.exited: set[str] = set()
        self.failure: Exception | None = None
        self.read = 0
        self.workers: list[Any] = []
        self.links: set[Any] = set()
        receiver: Any = SimpleNamespace(
            rings=[self.ring], links=self.links, process_exited=self.process_exited
        )
        self.watch = QuarantineWatch(receiver, self, self.registered, lambda: self.now)

    async def process_exited(self, peer: str) -> None:
        self.ring.fence_proven(lambda part: part.peer == peer)

    def has_exited(self, pod: Pod) -> bool:
        self.asked.append(pod)
        if self.failure is not None:
            raise self.failure
        return pod.uid in self.exited

    def registered(self) -> list[Any]:
        self.read += 1
        return self.workers

    def register(self, worker_id: str, epoch: int, pod: Pod) -> None:
        self.workers = [one for one in self.workers if one.worker_id != worker_id]
        self.workers.append(SimpleNamespace(worker_id=worker_id, epoch=epoch, pod=pod))

    def grant(self, number: int, peer: str) -> bytes:
        transfer_id = bytes([number]) * 16
        self.ring.ask(IncomingPart(transfer_id, peer, 0, 0, 100))
        return transfer_id

    async def passes(self, seconds: float) -> None:
        for _ in range(int(seconds * 2)):
            self.now += 0.5
            await self.watch.look()

    @property
    def quarantined(self) -> int:
        return self.ring.count(SlotState.QUARANTINED)


@pytest.fixture
def world() -> World:
    return World()


async def test_the_api_is_asked_about_slots_in_doubt_only(world):
    world.register("p1", 0xA, POD)
    world.grant(1, "p1@a")
    world.exited.add(POD.uid)
    await world.passes(20)
    assert not world.asked and not world.read, "a granted slot is in no doubt"
    world.ring.quarantine(b"\x01" * 16)
    await world.passes(GRACE_SECONDS - 0.5)
    assert not world.asked and not world.read, "most doubts end by themselves"
    await world.passes(1)
    assert world.asked == [POD] and world.read == 1
    assert world.quarantined == 0
    await world.passes(20)
    assert len(world.asked) == 1
    assert not world.watch._pods and not world.watch._due, "remembered for ever"
    world.ring.check_integrity()


async def test_without_a_proof_slots_stay_in_doubt_and_the_question_is_repeated_now_and_then(world):
    world.register("p1", 0xA, POD)
    world.ring.quarantine(world.grant(1, "p1@a"))
    await world.passes(GRACE_SECONDS + 4 * QUERY_SECONDS)
    assert world.quarantined == 1
    assert 4 <= len(world.asked) <= 5
    assert world.read == 1, "its subject is known by now"
    world.exited.add(POD.uid)
    await world.passes(QUERY_SECONDS)
    assert world.quarantined == 0


async def test_the_exit_of_one_peer_frees_its_slots_only(world):
    world.register("p1", 0xA, POD)
    world.register("p2", 0xB, replace(POD, uid="uid-2"))
    world.ring.quarantine(world.grant(1, "p1@a"))
    world.ring.quarantine(world.grant(2, "p2@b"))
    world.exited.add("uid-1")
    await world.passes(10)
    assert world.quarantined == 1
    assert {pod.uid for pod in world.asked} == {"uid-1", "uid-2"}


async def test_a_proof_about_a_successor_does_not_apply_to_its_predecessor(world):
    """The successor may have the same worker id, in another pod."""
    world.register("p1", 0xB, POD)
    world.exited.add(POD.uid)
    world.ring.quarantine(world.grant(1, "p1@a"))
    await world.passes(20)
    assert world.quarantined == 1 and not world.asked


async def test_an_epoch_that_was_read_in_time_is_kept(world):
    world.register("p1", 0xA, POD)
    world.ring.quarantine(world.grant(1, "p1@a"))
    await world.passes(GRACE_SECONDS + 1)
    world.register("p1", 0xB, replace(POD, uid="uid-2"))
    world.exited.add(POD.uid)
    await world.passes(QUERY_SECONDS)
    assert world.quarantined == 0


async def test_a_worker_that_left_the_registry_before_its_process_exited_is_queried(world):
    """A worker that fails leaves first; its last writes are in doubt when it is gone."""
    world.register("p1", 0xA, POD)
    link = Link("p1@a")
    world.links.add(link)
    granted = world.grant(1, "p1@a")
    await world.passes(1)
    assert world.read == 1 and not world.asked
    world.workers.clear()
    world.links.clear()
    world.ring.quarantine(granted)
    world.exited.add(POD.uid)
    await world.passes(GRACE_SECONDS + 1)
    assert world.quarantined == 0
    await world.passes(1)
    assert not world.watch._pods and not world.watch._pod_due, "remembered for ever"


async def test_the_registry_is_not_read_at_every_look_for_peers_that_name_no_pod(world):
    world.register("p1", 0xA, Pod())
    world.links.add(Link("p1@a"))
    await world.passes(4 * QUERY_SECONDS)
    assert 4 <= world.read <= 5
    world.register("p1", 0xA, POD)
    await world.passes(2 * QUERY_SECONDS)
    assert world.watch._pods == {"p1@a": POD} and world.read <= 6


async def test_a_registry_that_does_not_answer_ends_no_look(world, monkeypatch):
    asked: list[bool] = []

    def fails() -> list[Any]:
        asked.append(True)
        raise redis.ConnectionError("gone")

    world.links.add(Link("p1@a"))
    monkeypatch.setattr(world.watch, "registered", fails)
    await world.passes(2 * QUERY_SECONDS)
    assert len(asked) > 1, "it is asked again"


async def test_a_worker_outside_of_pods_is_asked_about_nowhere(world):
    world.register("p1", 0xA, Pod())
    world.ring.quarantine(world.grant(1, "p1@a"))
    await world.passes(20)
    assert world.quarantined == 1 and not world.asked


@pytest.mark.parametrize(
    "failure",
    [UnavailableError("the API answers 403"), redis.ConnectionError("gone"), AttributeError("no metadata")],
)
async def test_a_failed_query_is_repeated(world, failure):
    world.register("p1", 0xA, POD)
    world.exited.add(POD.uid)
    world.failure = failure
    world.ring.quarantine(world.grant(1, "p1@a"))
    await world.passes(10)
    assert world.quarantined == 1 and world.asked
    world.failure = None
    await world.passes(QUERY_SECONDS)
    assert world.quarantined == 0
