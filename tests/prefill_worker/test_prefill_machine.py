"""Attempts at the prefill worker under events in any order: runs that are repeated, cancels at every point, hand-offs
that are refused or fail, engine output that comes late, a drain of the worker. Nothing stays in its queue or in its
engine."""

from __future__ import annotations

from hypothesis import settings

from tests.prefill_worker.prefill_machine import REACHED, PrefillMachine

PrefillMachine.TestCase.settings = settings(max_examples=400, stateful_step_count=50, deadline=None)


class TestPrefillWorker(PrefillMachine.TestCase):  # type: ignore[valid-type, misc]  # made by Hypothesis
    @classmethod
    def tearDownClass(cls) -> None:
        super().tearDownClass()
        REACHED.check()
