"""Applies reports that a prefill worker's process has exited, after which none of its writes can land.

A report may come before this worker notices the broken connection, while the peer's last slot requests are still in a
socket. So the peer's streams end with the report, and it is applied until nothing of the peer is left.
"""

from __future__ import annotations

import asyncio

from kv_transfer.decode_side.receiver import HandoffReceiver
from kv_transfer.decode_side.ring import worker_of

RETRY_SECONDS = 0.1
REMEMBER_SECONDS = 30.0  # longer than a broken connection or a missing beat goes unnoticed


class ReportedPeerExits:
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
        claims = (slot.claim for ring in self._receiver.rings for slot in ring.slots)
        bound = {claim.peer for claim in claims if claim is not None}
        peers = bound | {link.name for link in self._receiver.links}
        return {peer for peer in peers if worker_of(peer) == worker_id}
