"""Prefill processes whose parent says that they have exited: nothing they posted can land any more.

The word may come before this worker notices the broken connection, and slots are quarantined only then. So it is
remembered, and applied until nothing of the peer is left.
"""

from __future__ import annotations

import asyncio

from kv_transfer.receiver import HandoffReceiver

AGAIN_SECONDS = 0.1
REMEMBER_SECONDS = 30.0  # longer than a broken connection or a missing beat goes unnoticed


class ExitedPeers:
    def __init__(self, receiver: HandoffReceiver):
        self._receiver = receiver

    async def apply(self, worker_id: str) -> None:
        """Returns when no slot is granted to, or in doubt because of, any life of `worker_id`."""
        deadline = asyncio.get_running_loop().time() + REMEMBER_SECONDS
        while (names := self._names(worker_id)) and asyncio.get_running_loop().time() < deadline:
            for name in names:
                self._receiver.process_exited(name)
            await asyncio.sleep(AGAIN_SECONDS)

    def _names(self, worker_id: str) -> set[str]:
        """`worker_id@epoch` of each of its lives that a slot is bound to."""
        claims = (slot.claim for ring in self._receiver.rings for slot in ring.slots)
        peers = {claim.peer for claim in claims if claim is not None}
        return {peer for peer in peers if peer.rsplit("@", 1)[0] == worker_id}
