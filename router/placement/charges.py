"""The load of this router's attempts, part of the load that all routers share, and its changes that Redis lacks."""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from cluster.membership.types import WorkerInfo
from cluster.protocol.priority import PriorityClass
from router.placement.types import PlacementRequest

FORMAT = 1  # first byte of a packed charge; a later one only appends fields (charges.lua)
CLASSES: tuple[PriorityClass, ...] = ("normal", "high", "batch")
MAX_CHANGES = 128  # of each kind in one call of settle.lua


@dataclass
class AttemptCharge:
    """The load of one attempt."""

    prefill: str  # worker_id@epoch
    decode: str
    prefill_tokens: int
    decode_tokens: int
    priority_class: PriorityClass = "normal"

    @property
    def packed(self) -> bytes:
        """The value of a field of `chg:…`, as charge.lua writes it."""
        p, d = self.prefill.encode(), self.decode.encode()
        head = FORMAT, CLASSES.index(self.priority_class), self.prefill_tokens, self.decode_tokens
        return struct.pack(f">BBIIH{len(p)}sH{len(d)}s", *head, len(p), p, len(d), d)


@dataclass(frozen=True)
class Changes:
    """The changes in one call of settle.lua. Each may be applied twice, and in any order with placements."""

    # Transfer id → packed charge, of placements that Redis did not make or has lost.
    added: dict[bytes, bytes]
    prefilled: list[bytes]
    released: list[bytes]

    @property
    def arguments(self) -> list[bytes | int]:
        pairs = [part for one in self.added.items() for part in one]
        return [len(self.prefilled), len(self.released), *self.prefilled, *self.released, *pairs]


class Charges:
    """This router's charges by transfer id. `add`, `prefilled`, `release`: one attempt each, in this order."""

    def __init__(self) -> None:
        self._charges: dict[bytes, AttemptCharge] = {}
        # Tokens by worker_id@epoch, of both kinds; none that has no load.
        self.by_worker: dict[str, int] = {}
        # Changes that Redis has not confirmed, in the order in which they were made
        self._added: dict[bytes, None] = {}
        self._prefilled: dict[bytes, None] = {}
        self._released: dict[bytes, None] = {}

    def add(
        self,
        request: PlacementRequest,
        prefill: WorkerInfo,
        decode: WorkerInfo,
        uncached: int,
        *,
        in_redis: bool,
    ) -> None:
        """`prefill`: the worker that computes the `uncached` tokens of the prompt, a decode worker too. `in_redis`: the
        script has charged it already."""
        former = self._charges.get(request.transfer_id)
        if former is not None:
            self._take_off(former)
        charge = self._charges[request.transfer_id] = AttemptCharge(
            prefill.name,
            decode.name,
            uncached,
            request.decode_tokens(local=prefill.name == decode.name),
            request.priority_class,
        )
        self._count(charge.prefill, charge.prefill_tokens)
        self._count(charge.decode, charge.decode_tokens)
        self._released.pop(request.transfer_id, None)
        if not in_redis:
            self._added[request.transfer_id] = None

    def prefilled(self, transfer_id: bytes) -> bool:
        """The prompt waits at no worker any more. False: nothing has changed."""
        charge = self._charges.get(transfer_id)
        if charge is None or not charge.prefill_tokens:
            return False
        self._count(charge.prefill, -charge.prefill_tokens)
        charge.prefill_tokens = 0
        self._prefilled[transfer_id] = None
        return True

    def release(self, transfer_id: bytes) -> bool:
        """The attempt has ended. False: it was not charged."""
        charge = self._charges.pop(transfer_id, None)
        if charge is None:
            return False
        self._take_off(charge)
        self.withdraw(transfer_id)
        return True

    def withdraw(self, transfer_id: bytes) -> None:
        """Take a charge off that Redis may have and no attempt holds."""
        self._added.pop(transfer_id, None)
        self._prefilled.pop(transfer_id, None)
        self._released[transfer_id] = None

    def restore(self, transfer_ids: Iterable[bytes]) -> None:
        """Redis has lost these."""
        self._added.update(dict.fromkeys(one for one in transfer_ids if one in self._charges))

    def restore_all(self) -> None:
        """Redis has no table of this router, so there is nothing to take off either."""
        self._prefilled.clear()
        self._released.clear()
        self.restore(self._charges)

    def clear(self) -> None:
        for transfer_id in list(self._charges):
            self.release(transfer_id)

    def __contains__(self, transfer_id: bytes) -> bool:
        return transfer_id in self._charges

    def __len__(self) -> int:
        return len(self._charges)

    @property
    def pending(self) -> bool:
        """Whether there are changes that Redis has not confirmed."""
        return bool(self._added or self._prefilled or self._released)

    @property
    def unconfirmed(self) -> int:
        """Changes that Redis has not confirmed, of charges that it may have."""
        return len(self._prefilled) + len(self._released)

    def changes(self) -> Changes:
        """The oldest changes, as many as one call may carry."""
        added = {one: self._charges[one].packed for one in _first(self._added)}
        return Changes(added, _first(self._prefilled), _first(self._released))

    def confirmed(self, changes: Changes) -> None:
        """Redis has applied them. A charge that has changed since it was packed is among the later changes too."""
        for queue, applied in (
            (self._added, changes.added),
            (self._prefilled, changes.prefilled),
            (self._released, changes.released),
        ):
            for transfer_id in applied:
                queue.pop(transfer_id, None)

    def in_redis(self) -> set[bytes]:
        """Transfer ids of the charges that Redis has confirmed."""
        return self._charges.keys() - self._added.keys()

    def _take_off(self, charge: AttemptCharge) -> None:
        self._count(charge.prefill, -charge.prefill_tokens)
        self._count(charge.decode, -charge.decode_tokens)

    def _count(self, name: str, tokens: int) -> None:
        if total := self.by_worker.get(name, 0) + tokens:
            self.by_worker[name] = total
        else:
            self.by_worker.pop(name, None)

    def total(self) -> dict[str, float]:
        """Tokens of attempts that have not ended, by stage."""
        charges = list(self._charges.values())  # read on the thread of scrapes as well
        return {
            "prefill": sum(charge.prefill_tokens for charge in charges),
            "decode": sum(charge.decode_tokens for charge in charges),
        }

    def load(self) -> Counter[str]:
        """This router's share of each field of `load`."""
        load: Counter[str] = Counter()
        for charge in self._charges.values():
            load["p:" + charge.prefill] += charge.prefill_tokens
            if charge.priority_class != "normal":
                load[f"{charge.priority_class}:p:{charge.prefill}"] += charge.prefill_tokens
            load["d:" + charge.decode] += charge.decode_tokens
        return +load


def _first(queue: dict[bytes, None]) -> list[bytes]:
    return [one for one, _ in zip(queue, range(MAX_CHANGES), strict=False)]
