"""How much a turn of the event loop may begin follows the processor time of the turn before."""

from __future__ import annotations

from router.admission.turn_allowance import TurnAllowance


def test_a_turn_may_begin_the_least_or_what_the_turn_before_computed() -> None:
    now = 100.0
    allowance = TurnAllowance(0.25, least=2, clock=lambda: now)  # binary fractions: sums are exact
    allowance.begin_turn()
    counts = []
    for seconds in (0.0, 0.5, 0.75, 1.125, 0.0):
        now += seconds
        counts.append(allowance.next_turn())
    assert counts == [2, 2, 3, 4, 2]
    now += 100.0
    allowance.begin_turn()
    assert allowance.next_turn() == 2, "nothing waited in the time before"
