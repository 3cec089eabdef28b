"""Prefill processes whose parent says that they have exited: nothing they posted can land any more.

The word may come before this worker notices the broken connection, while what the peer last asked for is still on its
way. So its streams end with the word, and it is applied until nothing of the peer is left.
"""

from __future__ import annotations

import asyncio

from kv_transfer.decode_side.receiver import HandoffReceiver
from kv_transfer.decode_side.ring import worker_of

AGAIN_SECONDS = 0.1
REMEMBER_SECONDS = 30.0  # longer than a broken connection or a missing beat goes unnoticed


class ReportedPeerExits:
    def __init__(self, receiver: HandoffReceiver):
        self._receiver = receiver

    async def apply(self, worker_id: str) -> None:
        """Returns when there is no stream of any life of `worker_id`, and no slot granted to it or in doubt because of
        it."""
        deadline = asyncio.get_running_loop().time() + REMEMBER_SECONDS
        while (names := self._names(worker_id)) and asyncio.get_running_loop().time() < deadline:
            for name in names:
                await self._receiver.process_exited(name)
            await asyncio.sleep(AGAIN_SECONDS)

    def _names(self, worker_id: str) -> set[str]:
        """`worker_id@epoch` of each of its lives that has a stream, or that a slot is bound to."""
        claims = (slot.claim for ring in self._receiver.rings for slot in ring.slots)
        bound = {claim.peer for claim in claims if claim is not None}
        peers = bound | {link.name for link in self._receiver.links}
        return {peer for peer in peers if worker_of(peer) == worker_id}
