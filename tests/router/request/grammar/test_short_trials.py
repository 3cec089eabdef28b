"""A grammar that takes long has a second, longer trial: grammars of other tenants wait for the short ones alone."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Sequence

import pytest

from cluster.errors import DrainingError, InvalidRequestError
from cluster.grammar.spec import GrammarSpec
from router.request.grammar import requested, trial
from router.request.grammar.requested import GrammarChecks, RequestedGrammar
from router.request.grammar.trial import Finding
from tests.harness.waiting import until


def asked_for(*texts: str) -> list[RequestedGrammar]:
    return [RequestedGrammar("guided", GrammarSpec("regex", text)) for text in texts]


class Trials:
    """What `long` begins with takes longer than a short trial; with `gate` each trial waits for it."""

    def __init__(self, gate: threading.Semaphore | None = None):
        self.tried: list[list[str]] = []
        self._gate = gate

    def find(self, specs: Sequence[GrammarSpec]) -> Finding:
        texts = [spec.text for spec in specs]
        self.tried.append(texts)
        if self._gate is None:
            late = next((i for i, text in enumerate(texts) if text.startswith("long")), None)
            return Finding(len(texts)) if late is None else Finding(late, unfinished=True)
        assert self._gate.acquire(timeout=30)
        bad = next((i for i, text in enumerate(texts) if text.endswith("bad")), None)
        return Finding(len(texts)) if bad is None else Finding(bad, bad, "it takes too much")

    def close(self) -> None:
        pass


@pytest.fixture
async def checks(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[GrammarChecks]:
    monkeypatch.setattr(requested, "make_tokenizer", lambda *given: None)
    made = GrammarChecks("{}", 8, (2,))
    yield made
    made.close()


async def test_a_grammar_waits_for_no_long_trial_of_another_tenant(checks, monkeypatch):
    gate = threading.Semaphore(0)
    short, long = Trials(), Trials(gate)
    monkeypatch.setattr(checks, "_trials", short)
    monkeypatch.setattr(checks, "_long_trials", long)
    try:
        many = [asyncio.create_task(checks.check("many", *asked_for("a", f"long {n}"))) for n in range(3)]
        many.append(asyncio.create_task(checks.check("many", *asked_for("long bad", "whole"))))
        await until(lambda: len(short.tried) == 4 and len(long.tried) == 1, "tried")
        await asyncio.wait_for(checks.check("other", *asked_for("quick")), 20)
        assert not any(task.done() for task in many)
        other = asyncio.create_task(checks.check("other", *asked_for("long other")))
        await until(lambda: len(short.tried) == 6, "tried")
    finally:
        gate.release(9)
    *passed, refused = await asyncio.gather(*many, return_exceptions=True)
    await other
    assert passed == [None] * 3 and isinstance(refused, InvalidRequestError)
    turns = [["long 0"], ["long 1"], ["long other"], ["long 2"], ["long bad", "whole"]]
    assert long.tried == turns, "what has passed is not tried again; tenants in turn"
    assert not checks._trying


@pytest.mark.parametrize("text", ["waits", "long"])
async def test_a_router_that_ends_sends_requests_elsewhere(text, checks, monkeypatch):
    """Those that wait for a turn, and those whose short trial has just ended."""
    began, gate = threading.Event(), threading.Semaphore(0)

    class Gated(Trials):
        def find(self, specs: Sequence[GrammarSpec]) -> Finding:
            began.set()
            assert gate.acquire(timeout=30)
            return super().find(specs)

    short, long = Gated(), Trials()
    monkeypatch.setattr(checks, "_trials", short)
    monkeypatch.setattr(checks, "_long_trials", long)
    first, second = (
        asyncio.create_task(checks.check(tenant, *asked_for(text + tenant))) for tenant in ("1", "2")
    )
    await until(began.is_set, "tried")
    checks.close()
    gate.release(2)
    with pytest.raises(DrainingError):
        await asyncio.wait_for(second, 20)
    if text == "long":
        with pytest.raises(DrainingError):
            await asyncio.wait_for(first, 20)
    else:
        await asyncio.wait_for(first, 20)
    assert not long.tried and not checks._trying


def test_a_short_trial_decides_nothing_about_what_takes_longer(monkeypatch):
    def works(tokenizer: object, spec: GrammarSpec) -> None:
        end = time.process_time() + (0.5 if spec.text == "long" else 0.0)
        while time.process_time() < end:
            pass

    monkeypatch.setattr(trial, "tried", works)
    monkeypatch.setattr(trial, "_limit", lambda: None)
    specs = [one.spec for one in asked_for("a", "long", "b")]
    assert trial._in_a_process(None, specs, 0.05) == Finding(1, unfinished=True)
    assert trial._in_a_process(None, specs[::2], 0.05) == Finding(2)
