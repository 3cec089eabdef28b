"""The workers of one placement in the script's form: made once per membership, sent with every call."""

from __future__ import annotations

import struct
from collections.abc import Sequence

from cluster.membership.types import WorkerInfo
from router.placement.types import Mode

MAX_PLACES = 2**16


class Candidates:
    """Prefill workers first, then decode workers; an index in the script's answer counts from 1."""

    def __init__(self, prefill: Sequence[WorkerInfo], decode: Sequence[WorkerInfo], mode: Mode):
        self.prefill, self.decode = prefill, decode
        self.workers = [*prefill, *decode]
        self.model_id = decode[0].model_id if decode else ""
        may_local = mode in ("always", "auto") or (mode == "fallback" and not prefill)
        slots = [str(worker.slot) for worker in self.workers]
        loads = [f"p:{worker.name}" for worker in prefill] + [f"d:{worker.name}" for worker in decode]
        if may_local:
            loads += [f"p:{worker.name}" for worker in decode]
        capacities = [float(worker.blocks_total * worker.page_size) for worker in decode]
        self.arguments: list[bytes] = [
            str(len(prefill)).encode(),
            str(len(self.workers)).encode(),
            struct.pack(f">{len(decode)}d", *capacities),
            self._places(),
            *(text.encode() for text in slots + loads),
        ]

    def _places(self) -> bytes:
        """Numbers in place of names: the script only asks whether two are the same."""
        numbers: dict[str, int] = {}
        return b"".join(
            struct.pack(">H", numbers.setdefault(worker.place or worker.host, len(numbers)) % MAX_PLACES)
            for worker in self.workers
        )
