"""An engine without free blocks, to which hand-offs are offered."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from cluster.errors import BlocksExhaustedError
from engine.scheduler.decision import StepDecision
from engine.scheduler.refusals import KEPT_SECONDS
from tests.engine.parts import PAGE, STEP_SECONDS, Parts, request

BLOCKS = 40
TOKENS = 5  # of each request
KEPT = round(KEPT_SECONDS / STEP_SECONDS)


class OfferedHandOffs:
    """Hand-offs of two blocks each, as many as there is room for, before every step."""

    def __init__(self, blocks: int = BLOCKS, **settings: object):
        self.parts = Parts(blocks, **settings)
        self.got: Counter[str] = Counter()
        self.count = 0

    def step(self, tenant: str = "") -> None:
        while self.offer(tenant):
            pass
        self.got += self.parts.step(check=False)
        for name in [name for name in self.parts.scheduler.requests if self.got[name] >= TOKENS]:
            self.parts.scheduler.remove(name)

    def offer(self, tenant: str = "", **more: Any) -> bool:
        self.count += 1
        try:
            self.parts.hand_off(f"hand-off {self.count}", blocks=2, tenant=tenant, **more)
        except BlocksExhaustedError:
            return False
        return True

    def preempt(self, name: str) -> None:
        (sequence,) = self.parts.choices(name)
        self.parts.scheduler.preempt(sequence, StepDecision())

    def steps_until(self, names: list[str], tenant: str = "") -> int:
        """Until each of them has got a token more."""
        before = Counter({name: self.got[name] for name in names})
        for step in range(1, 500):
            self.step(tenant)
            if all(self.got[name] > before[name] for name in names):
                self.parts.check()
                return step
        raise AssertionError(f"no token: {[name for name in names if self.got[name] == before[name]]}")


def refused_now(parts: Parts) -> None:
    with pytest.raises(BlocksExhaustedError):
        parts.scheduler.reserve(request("refused", [5], tenant="d"), [], 8 * PAGE)
