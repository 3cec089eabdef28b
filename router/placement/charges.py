"""What this router's attempts add to the load that all routers share."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from cluster.membership.types import WorkerInfo
from router.placement.script_call import Argument
from router.placement.types import PlacementRequest, PriorityClass


@dataclass
class AttemptCharge:
    """One attempt's share."""

    prefill: str  # worker_id@epoch
    decode: str
    prefill_tokens: int
    decode_tokens: int
    priority_class: PriorityClass = "normal"


class Charges:
    """By transfer id. `add`, `prefilled`, `release`: one attempt each, in this order."""

    def __init__(self) -> None:
        self._charges: dict[bytes, AttemptCharge] = {}

    def add(self, request: PlacementRequest, prefill: WorkerInfo, decode: WorkerInfo, uncached: int) -> None:
        """`prefill`: the worker that computes the `uncached` tokens of the prompt, a decode worker too."""
        self._charges[request.transfer_id] = AttemptCharge(
            prefill.name,
            decode.name,
            uncached,
            request.token_count + request.output_tokens,
            request.priority_class,
        )

    def prefilled(self, transfer_id: bytes) -> bool:
        """The prompt waits at no worker any more. False: nothing has changed."""
        charge = self._charges.get(transfer_id)
        if charge is None or not charge.prefill_tokens:
            return False
        charge.prefill_tokens = 0
        return True

    def release(self, transfer_id: bytes) -> bool:
        """The attempt has ended. False: it was not charged."""
        return self._charges.pop(transfer_id, None) is not None

    def clear(self) -> None:
        self._charges.clear()

    def __bool__(self) -> bool:
        return bool(self._charges)

    def by_worker(self) -> Counter[str]:
        """Tokens by worker_id@epoch, of both kinds."""
        load: Counter[str] = Counter()
        for charge in self._charges.values():
            load[charge.prefill] += charge.prefill_tokens
            load[charge.decode] += charge.decode_tokens
        return load

    def total(self) -> dict[str, float]:
        """Tokens of attempts that have not ended, by stage."""
        charges = list(self._charges.values())  # read on the thread of scrapes as well
        return {
            "prefill": sum(charge.prefill_tokens for charge in charges),
            "decode": sum(charge.decode_tokens for charge in charges),
        }

    def table(self) -> list[Argument]:
        """Fields of `load` and amounts, in turns: arguments of settle.lua."""
        table: Counter[str] = Counter()
        for charge in self._charges.values():
            table["p:" + charge.prefill] += charge.prefill_tokens
            if charge.priority_class != "normal":
                table[f"{charge.priority_class}:p:{charge.prefill}"] += charge.prefill_tokens
            table["d:" + charge.decode] += charge.decode_tokens
        return [part for field, amount in table.items() if amount for part in (field, amount)]
