"""When drafting ends: it takes longer than it saves, or the draft model fails."""

from __future__ import annotations

import logging
from collections.abc import Callable

import pytest
from torch import Tensor

from engine.engine import Engine
from engine.plan import StepPlan
from engine.request import EngineRequest
from engine.speculation import draft_model
from engine.speculation.draft_gate import DraftGate
from tests.engine.fake_model import continuation, greedy
from tests.engine.speculation.draft_engines import DRAFT, Observed, answers, drafting

# --- whether it pays -------------------------------------------------------------------------------------


class Timed(Observed):
    """Each step takes `seconds`."""

    def __init__(self, now: list[float], seconds: float):
        super().__init__(400)
        self.now, self.seconds = now, seconds

    def execute(self, plan: StepPlan, drawn: Tensor | None = None) -> Tensor:
        self.now[0] += self.seconds
        return super().execute(plan, drawn)


@pytest.mark.parametrize(("seconds", "most"), [(0.1, 1000), (2.0, 4 * (16 + 1) + 4)])
def test_a_draft_model_that_takes_too_long_is_switched_off(seconds, most):
    """Steps of the target take 1 s. A slow draft model, though its drafts are right, has up to 16 steps of each trial."""
    now, total = [0.0], 0
    target = Timed(now, 1.0)
    target.config = target.config.model_copy(update={"draft_model": DRAFT})
    engine = Engine(target, target.config, secret=b"s", clock=lambda: now[0], draft=Timed(now, seconds))
    for number in range(3):  # 120 tokens in all
        prompt = [5 + number] * 20
        engine.add(EngineRequest(f"r{number}", prompt, greedy(40)))
        got = answers(engine)
        assert got == {f"r{number}": continuation(prompt, 40)}
        total += 40
    stats = engine.stats()
    assert stats.draft_tokens_accepted == stats.draft_tokens
    assert 20 < stats.draft_tokens <= most
    assert (now[0] < 0.7 * total) == (seconds < 1)


def test_a_gate_compares_seconds_per_token():
    gate = DraftGate()

    def run_some(count: int, drafted: float, tokens: int) -> int:
        """Steps of 4 sequences that had drafts; one without takes 1 s."""
        allowed = 0
        for _ in range(count):
            if gate.allows(4):
                allowed += 1
                gate.record_drafted(4, drafted, tokens)
            else:
                gate.record_plain(4, 1.0)
        return allowed

    assert run_some(104, 2.0, 12) == 100, "four steps show what one without takes"
    assert run_some(1000, 2.0, 12) > 980
    assert run_some(80, 2.0, 4) < 40, "more seconds than tokens"
    assert not gate.allows(4)
    assert run_some(10_000, 2.0, 4) < 300
    assert run_some(2000, 2.0, 12) > 900, "it is tried again"
    assert not gate.allows(5), "another number of sequences is measured for itself"


@pytest.mark.parametrize(("seconds", "outputs", "most"), [(1.1, 5, 280), (0.1, 40, 150)])
def test_catching_up_that_costs_more_than_drafts_save_is_switched_off(seconds, outputs, most, monkeypatch):
    """Steps of the target take 1 s without drafts. Prompts of 20 tokens are caught up with in ten chunks, so short answers
    have few drafts or none."""
    monkeypatch.setattr(draft_model, "CATCH_UP_TOKENS", 2)
    now, total = [0.0], 0
    target = Timed(now, 1.0)
    target.config = target.config.model_copy(update={"draft_model": DRAFT})
    engine = Engine(target, target.config, secret=b"s", clock=lambda: now[0], draft=Timed(now, seconds))
    while total < 200:
        prompt = [5 + total // outputs] * 20
        engine.add(EngineRequest(f"r{total}", prompt, greedy(outputs)))
        assert len(answers(engine)[f"r{total}"]) == outputs
        total += outputs
    assert now[0] < most


def test_a_gate_counts_what_catching_up_costs():
    gate = DraftGate()
    for _ in range(4):
        gate.record_plain(2, 1.0)
    for _ in range(60):  # four steps with drafts make up for one chunk each
        assert gate.allows(2)
        gate.record_catching_up(2, 4.0)
        for _ in range(4):
            gate.record_plain(2, 1.0)
            gate.record_drafted(2, 1.0, 4)
    for _ in range(33):
        assert gate.allows(2)
        gate.record_catching_up(2, 2.0)
    assert not gate.allows(2)


def run_steps(
    gate: DraftGate, steps: int, tokens: int = 6, slower: Callable[[int], float] = lambda step: 1.0
) -> int:
    """Run steps of 2 sequences; one without drafts takes 1 s, one with drafts 1.5 s for `tokens` in all. Returns how many
    had drafts. `slower`: how many times longer a step takes."""
    drafted = 0
    for step in range(steps):
        if gate.allows(2):
            drafted += 1
            gate.record_drafted(2, 1.5 * slower(step), tokens)
        else:
            gate.record_plain(2, slower(step))
    return drafted


def test_delayed_steps_do_not_turn_drafts_off():
    """One step that stops for a minute, every now and then, and all steps for a while."""
    gate = DraftGate()
    assert run_steps(gate, 200, slower=lambda step: 60.0 if step in (30, 110, 190) else 1.0) == 196
    assert run_steps(gate, 200, slower=lambda step: 5.0 if step < 50 else 1.0) > 180
    for _ in range(20):  # a prompt of many chunks, one of which is delayed
        gate.record_catching_up(2, 1.5)
    gate.record_catching_up(2, 60.0)
    assert run_steps(gate, 100) > 95


def test_drafts_that_do_not_pay_are_measured_twice_before_they_are_off():
    gate = DraftGate()
    found = [run_steps(gate, steps, tokens=2) for steps in (4 + 16 + 4 + 16, 64, 16, 128, 16, 256)]
    assert found == [32, 0, 16, 0, 16, 0]


# --- failures --------------------------------------------------------------------------------------------


class Failing(Observed):
    def execute(self, plan: StepPlan, drawn: Tensor | None = None) -> Tensor:
        if len(self.plans) == 3:
            raise RuntimeError("out of luck")
        return super().execute(plan, drawn)


@pytest.mark.parametrize(("kind", "reason"), [(Failing, "out of luck"), (Observed, "are not finite")])
def test_a_failure_ends_drafting_and_no_request(kind, reason, caplog):
    draft = kind()
    engine = drafting(draft)
    for name in ("a", "b"):
        engine.add(EngineRequest(name, [ord(name) - 60] * 6, greedy(30)))
    if kind is Observed:
        draft.sick.add("b")  # its logits are NaN
    with caplog.at_level(logging.ERROR):
        got = answers(engine)
    assert got == {name: continuation([ord(name) - 60] * 6, 30) for name in ("a", "b")}
    assert engine.stats().draft_failures == 1 and engine._drafter.method is None
    (line,) = [one.getMessage() for one in caplog.records if "speculation has failed" in one.getMessage()]
    assert reason in line
