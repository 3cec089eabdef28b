"""Which waiting sequences count as of a higher class after a long wait."""

from __future__ import annotations

from engine.scheduler.aging import AGING_SECONDS
from tests.engine.parts import PAGE, Parts, request


class Waiting:
    """Prompts of the class batch that find no blocks, and a clock."""

    def __init__(self, count: int, held: int = 40):
        self.parts = Parts(40)
        self.parts.step_seconds = 0.0
        self.parts.hand_off("holds", blocks=held)
        self.parts.scheduler.set_paused("holds", True)
        for number in range(count):
            self.add(f"bulk {number}", "bulk")

    def add(self, name: str, tenant: str, priority: int = -1) -> None:
        prompt = [len(name)] * PAGE
        self.parts.scheduler.add(request(name, prompt, 100, tenant=tenant, priority=priority))

    def after(self, seconds: float) -> list[int]:
        """The ranks of all that wait, in their order, after a step at each twentieth of so many seconds."""
        for _ in range(20):
            self.parts.now += seconds / 20
            self.parts.step()
        return [one.rank for one in self.parts.scheduler.waiting]


def test_of_a_backlog_one_rises_in_each_aging_time() -> None:
    waiting = Waiting(12)
    assert waiting.after(AGING_SECONDS - 5) == 12 * [1]
    assert waiting.after(6.5) == [0] + 11 * [1]
    assert sorted(waiting.after(AGING_SECONDS)) == [-1, 0] + 10 * [1]


def test_each_tenant_has_one_that_rises() -> None:
    waiting = Waiting(3)
    for number in range(3):
        waiting.add(f"other {number}", "other")
    assert waiting.after(AGING_SECONDS + 2) == [0, 0] + 4 * [1]


def test_a_long_backlog_does_not_come_before_a_later_prompt_of_a_higher_class() -> None:
    waiting = Waiting(12)
    waiting.after(2 * AGING_SECONDS + 5)
    waiting.add("high", "vip", priority=1)
    names = [one.request.request_id for one in waiting.parts.scheduler.waiting]
    assert names.index("high") <= 1


def test_none_rises_while_its_tenant_has_turns() -> None:
    """There is room for one at a time; none runs as long as an aging time."""
    waiting = Waiting(8, held=39)
    for number in range(6):
        waiting.parts.step()
        (runs,) = [one for one in waiting.parts.scheduler.running if one.request.tenant == "bulk"]
        assert runs.request.request_id == f"bulk {number}"
        waiting.parts.scheduler.set_paused(runs.request.request_id, True)
        assert set(waiting.after(AGING_SECONDS * 0.6)) == {1}
        waiting.parts.scheduler.remove(runs.request.request_id)
