"""Ends the quarantine of slots of a prefill worker whose process has exited: on a report of its parent process, or on
Kubernetes, where no parent reports, by asking the API.

in quarantine for 2 s ─► the peer's pod, from its registration ─► container terminated? ─► its slots are free again

The API is called only while slots are in quarantine.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from cluster.config.worker import WorkerConfig
from cluster.errors import SetupError
from cluster.kubernetes.pod import Pod
from cluster.membership.reader import read_workers
from cluster.membership.types import WorkerInfo
from kv_transfer.decode_side.receiver import HandoffReceiver
from kv_transfer.decode_side.ring import SlotState, worker_of

log = logging.getLogger(__name__)
POLL_SECONDS = 1.0
GRACE_SECONDS = 2.0  # before the first query: most quarantines end with the peer's own Drained
QUERY_SECONDS = 5.0  # between two queries about the same peer


class PeerExitSource(Protocol):
    """A source of proofs that a peer's process has exited."""

    def has_exited(self, pod: Pod) -> bool:
        """True if there is a proof, False if there is none yet. May block. Raises UnavailableError for no answer."""


@dataclass(eq=False)
class QuarantineWatch:
    """Polls for slots in quarantine and frees those of peers that have provably exited.

    `registered` returns the workers of the registry; it may block. Peers are keyed by worker_id@epoch, so that a proof
    about one epoch is never applied to another. The pod of a peer is looked up when it connects: a worker that fails
    leaves the registry before its process exits.
    """

    receiver: HandoffReceiver
    exits: PeerExitSource
    registered: Callable[[], Sequence[WorkerInfo]]
    clock: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        self._due: dict[str, float] = {}  # peer with slots in quarantine → time of the next query
        self._pods: dict[str, Pod] = {}
        self._pod_due: dict[str, float] = {}  # connected peer without a known pod → time of the next look-up
        self._failing = False

    async def run(self) -> None:
        """Poll until cancelled."""
        while True:
            await asyncio.sleep(POLL_SECONDS)
            await self.look()

    async def look(self) -> None:
        quarantined, now = self._quarantined(), self.clock()
        self._due = {peer: self._due.get(peer, now + GRACE_SECONDS) for peer in quarantined}
        known = quarantined | {link.name for link in self.receiver.links}
        self._pods = {peer: pod for peer, pod in self._pods.items() if peer in known}
        await self._look_up_pods(known - quarantined, now)
        for peer in [peer for peer, due in self._due.items() if due <= now]:
            self._due[peer] = now + QUERY_SECONDS
            if await self._proven(peer):
                log.warning("%s has exited: the quarantine of its slots ends", peer)
                await self.receiver.process_exited(peer)

    def _quarantined(self) -> set[str]:
        slots = (slot for ring in self.receiver.rings for slot in ring.slots)
        return {
            slot.part.peer
            for slot in slots
            if slot.part is not None and slot.machine.state is SlotState.QUARANTINED
        }

    async def _look_up_pods(self, connected: set[str], now: float) -> None:
        """Look up the pods of peers that have connected, again every QUERY_SECONDS for those that name none."""
        self._pod_due = {peer: self._pod_due.get(peer, now) for peer in connected if peer not in self._pods}
        if any(at <= now for at in self._pod_due.values()):
            self._pod_due = dict.fromkeys(self._pod_due, now + QUERY_SECONDS)
            with contextlib.suppress(Exception):  # without Redis: its other users log that
                await self._read_pods()

    async def _proven(self, peer: str) -> bool:
        try:
            if peer not in self._pods:
                await self._read_pods()
            pod = self._pods.get(peer)
            proven = pod is not None and await asyncio.to_thread(self.exits.has_exited, pod)
        except Exception as error:  # it is tried again, and other peers are checked
            if not self._failing:
                log.warning(
                    "cannot check whether %s has exited, its slots stay in quarantine: %r", peer, error
                )
            self._failing = True
            return False
        self._failing = False
        return proven

    async def _read_pods(self) -> None:
        for worker in await asyncio.to_thread(self.registered):
            if worker.pod.uid:
                self._pods.setdefault(f"{worker.worker_id}@{worker.epoch:x}", worker.pod)


def open_quarantine_watch(config: WorkerConfig, receiver: HandoffReceiver) -> QuarantineWatch | None:
    """The watch that `config.peer_exits` asks for, or None. Raises SetupError if no API is configured."""
    if config.peer_exits == "none":
        return None
    from kubernetes import config as kubernetes_config

    from cluster.kubernetes.api import open_api
    from cluster.kubernetes.pod import PodExits

    try:
        api = open_api(config.topology.kubeconfig)
    except (kubernetes_config.ConfigException, OSError) as error:
        raise SetupError(
            f"peer_exits kubernetes: neither a kubeconfig nor the service account of a pod: {error}",
            field="peer_exits",
        ) from error
    return QuarantineWatch(receiver, PodExits(api), lambda: read_workers(config.redis_url, config.namespace))


RETRY_SECONDS = 0.1
REMEMBER_SECONDS = 30.0  # longer than a broken connection or a missing beat goes unnoticed


class ReportedPeerExits:
    """Applies reports that a prefill worker's process has exited, after which none of its writes can land.

    A report may come before this worker notices the broken connection, while the peer's last slot requests are still in
    a socket. So the peer's streams end with the report, and it is applied until nothing of the peer is left.
    """

    def __init__(self, receiver: HandoffReceiver):
        self._receiver = receiver

    async def apply(self, worker_id: str) -> None:
        """Return when no epoch of `worker_id` has a stream, a granted slot or a slot in quarantine."""
        deadline = asyncio.get_running_loop().time() + REMEMBER_SECONDS
        while (names := self._names(worker_id)) and asyncio.get_running_loop().time() < deadline:
            for name in names:
                await self._receiver.process_exited(name)
            await asyncio.sleep(RETRY_SECONDS)

    def _names(self, worker_id: str) -> set[str]:
        """`worker_id@epoch` of each epoch that has a stream, or that a slot is bound to."""
        parts = (slot.part for ring in self._receiver.rings for slot in ring.slots)
        bound = {part.peer for part in parts if part is not None}
        peers = bound | {link.name for link in self._receiver.links}
        return {peer for peer in peers if worker_of(peer) == worker_id}
