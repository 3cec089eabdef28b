"""Grammars are tried in processes of their own, whose end is a verdict only where the grammar is its cause."""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import fcntl
import os
import resource
import select
import signal
import time
from typing import Any

import pytest

from cluster.errors import DrainingError, InvalidRequestError
from cluster.grammar.spec import GrammarSpec
from router.request.grammar import requested, trial
from router.request.grammar.requested import GrammarChecks, RequestedGrammar
from router.request.grammar.trial import Finding, GrammarTrials
from tests.harness.waiting import wait_for

SPECS = [GrammarSpec("regex", "a"), GrammarSpec("regex", "b"), GrammarSpec("regex", "c")]


def works(seconds):
    end = time.process_time() + seconds
    while time.process_time() < end:
        pass


@pytest.fixture
def quick(monkeypatch):
    """Shorter times of the same order. Each is far above what an empty trial takes."""
    for name, seconds in [("CPU", 0.2), ("TOTAL_CPU", 0.3), ("HANG", 0.2), ("POLL", 0.02)]:
        monkeypatch.setattr(trial, f"{name}_SECONDS", seconds)
    monkeypatch.setattr(trial, "_limit", lambda: None)


def ends(number):
    faulthandler.disable()
    with contextlib.suppress(OSError):  # a handler of another test in this process
        signal.signal(number, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.kill(os.getpid(), number)


def fails(error):
    raise error


TOO_MUCH = (trial._TOO_MUCH, "0.2 s, 192 MiB", True)
NO_VERDICT = trial._NO_VERDICT


@pytest.mark.parametrize(
    ("work", "answer"),
    [
        (lambda: works(9), Finding(0, 0, *TOO_MUCH)),
        (lambda: works(0.12), Finding(2, 2, "its 3 parts take too much time together", "0.3 s", False)),
        (signal.pause, Finding(0, 0, *TOO_MUCH)),
        (lambda: ends(signal.SIGSTOP), NO_VERDICT),
        (lambda: ends(signal.SIGKILL), NO_VERDICT),
        (lambda: ends(signal.SIGTERM), NO_VERDICT),
        (lambda: ends(signal.SIGSEGV), Finding(0, 0, *TOO_MUCH)),
        (lambda: ends(signal.SIGABRT), Finding(0, 0, *TOO_MUCH)),
        (lambda: ends(signal.SIGBUS), Finding(0, 0, *TOO_MUCH)),
        (lambda: fails(MemoryError()), Finding(0, 0, *TOO_MUCH)),
        (lambda: fails(RecursionError()), Finding(0, 0, *TOO_MUCH)),
        (lambda: None, Finding(3)),
    ],
    ids=[
        *("works", "all work", "hangs", "has no processor", "killed", "ended", "segv", "abort", "bus"),
        *("memory", "depth", "passes"),
    ],
)
def test_processor_time_decides_what_is_too_much(quick, monkeypatch, work, answer):
    """A stopped process stands for one that gets no processor."""
    if answer == NO_VERDICT:
        monkeypatch.setattr(trial, "WALL_SECONDS", 0.4)
    monkeypatch.setattr(trial, "tried", lambda tokenizer, spec: work())
    found = trial._in_a_process(None, SPECS)
    assert found == answer and type(found) is type(answer)


def test_a_fault_of_the_router_is_no_refusal(quick, monkeypatch):
    monkeypatch.setattr(trial, "tried", lambda tokenizer, spec: fails(KeyError("ours")))
    assert str(trial._in_a_process(None, SPECS)).endswith("KeyError: 'ours'\n")
    monkeypatch.setattr(trial, "_limit", lambda: fails(OSError("no more files")))
    assert str(trial._in_a_process(None, SPECS)).endswith("OSError: no more files\n")
    monkeypatch.setattr(trial, "_limit", lambda: ends(signal.SIGSEGV))
    assert trial._in_a_process(None, SPECS) == NO_VERDICT, "no grammar was begun"


@pytest.fixture
async def checks(monkeypatch):
    monkeypatch.setattr(requested, "make_tokenizer", lambda *given: None)
    made = GrammarChecks("{}", 8, (2,))
    yield made
    made.close()


@pytest.fixture
def stubbed(checks, quick, monkeypatch):
    """Checks by processes of this module; returns the texts that each one was given. Grammars do what their texts say."""
    works_of: dict[str, Any] = {"slow": lambda: works(0.06), "evil": lambda: ends(signal.SIGABRT)}

    def tried(tokenizer, spec):
        works_of.get(spec.text.split()[0], lambda: None)()

    trials: list[list[str]] = []

    def find(specs):
        trials.append([spec.text for spec in specs])
        return trial._in_a_process(None, specs)

    monkeypatch.setattr(trial, "tried", tried)
    monkeypatch.setattr(checks._trials, "find", find)
    return trials


def asked_for(*texts):
    return [RequestedGrammar(f"field {text}", GrammarSpec("regex", text)) for text in texts]


async def test_a_grammar_that_ends_the_process_is_never_allowed(checks, stubbed):
    with pytest.raises(InvalidRequestError, match="field evil: it takes too much"):
        await checks.check("", *asked_for("slow 1", "slow 2", "evil", "whole"))
    for _ in range(2):
        with pytest.raises(InvalidRequestError, match="field evil"):
            await checks.check("", *asked_for("evil"))
    await checks.check("", *asked_for("whole"))
    assert stubbed == [["slow 1", "slow 2", "evil", "whole"], ["evil"], ["whole"]]


async def test_too_much_time_together_is_not_remembered(checks, stubbed):
    many = [f"slow {i}" for i in range(8)]  # 0.48 s of 0.3
    with pytest.raises(InvalidRequestError, match="field whole: its 9 parts take too much time together"):
        await checks.check("", *asked_for(*many, "whole"))
    passed = [text for text in many if ("", asked_for(text)[0].spec.key) in checks._checked]
    assert 1 <= len(passed) <= 5 and passed == many[: len(passed)]
    await checks.check("", *asked_for("whole"))
    assert stubbed[1:] == [["whole"]]


async def test_equal_grammars_in_flight_are_tried_once(checks, stubbed):
    many = [f"slow {i}" for i in range(8)]
    same = [checks.check("t", *asked_for(*many, "whole")) for _ in range(4)]
    part = checks.check("t", *asked_for("slow 7", "own"))
    *refused, allowed = await asyncio.gather(*same, part, return_exceptions=True)
    assert all(isinstance(one, InvalidRequestError) for one in refused) and allowed is None
    assert stubbed == [[*many, "whole"], ["own"], ["slow 7"]] and not checks._trying


async def test_a_verdict_is_known_to_its_tenant_only(checks, stubbed):
    """Else the time of its answer would tell a tenant that another one has used the same schema."""
    for tenant in ("mine", "mine", "probing", "mine"):
        await checks.check(tenant, *asked_for("own"))
        with pytest.raises(InvalidRequestError, match="field evil"):
            await checks.check(tenant, *asked_for("evil"))
    assert stubbed == 2 * [["own"], ["evil"]]


async def test_a_tenants_flood_displaces_its_own_verdicts(checks, stubbed, monkeypatch):
    monkeypatch.setattr(requested, "MAX_CHECKED", 4)
    await checks.check("quiet", *asked_for("own"))
    for _ in range(2):
        await checks.check("flood", *asked_for(*"abcdef"))
    await checks.check("quiet", *asked_for("own"))
    assert stubbed == [["own"], [*"abcdef"], [*"abc"]] and len(checks._checked) == 4
    checks._checked.check_integrity()


async def test_a_trial_that_no_request_waits_for_is_never_begun(checks, stubbed, monkeypatch):
    first = asyncio.create_task(checks.check("t", *asked_for("slow")))
    left = [asyncio.create_task(checks.check("t", *asked_for("left"))) for _ in range(2)]
    stays = [asyncio.create_task(checks.check("t", *asked_for("stays"))) for _ in range(2)]
    await asyncio.sleep(0)
    for task in (*left, stays[0]):
        task.cancel()
    await asyncio.gather(first, *left, *stays, return_exceptions=True)
    assert stubbed == [["slow"], ["stays"]] and stays[1].exception() is None and not checks._trying


def test_a_router_with_many_files_waits_for_its_pipes():
    """select() fails for those from 1024 on."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(2048, limits[1]), limits[1]))
    ours, theirs = os.pipe()
    far = fcntl.fcntl(ours, fcntl.F_DUPFD, 1024)
    try:
        assert not trial._is_ready(far, select.POLLIN, 0.01)
        os.write(theirs, b'["verdict", [1]]\n')
        os.close(theirs)
        assert trial._read(far, os.getpid()) == ([["verdict", [1]]], "")
    finally:
        os.close(ours)
        os.close(far)
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_a_process_of_grammars_outlives_its_server_by_seconds(quick, monkeypatch):
    """It also keeps none of the server's pipes, whose end tells the router that the server has ended."""
    monkeypatch.setattr(trial, "WALL_SECONDS", 0.1)
    monkeypatch.setattr(trial, "tried", lambda tokenizer, spec: signal.pause())
    ours, theirs = os.pipe()
    pid = os.fork()
    if pid == 0:
        trial._try_all(None, SPECS, theirs)
    os.close(theirs)
    assert os.read(ours, 65536), "it has begun"
    assert [os.readlink(f"/proc/{pid}/fd/{number}") for number in (0, 1, 2)] == [os.devnull] * 3
    ended: list[int] = []

    def has_ended() -> bool:
        found, status = os.waitpid(pid, os.WNOHANG)
        ended.extend([status] if found else [])
        return bool(found)

    try:
        wait_for(has_ended, 30, "it has ended")
    finally:
        os.close(ours)
        if not ended:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
    assert os.WIFSIGNALED(ended[0]) and os.WTERMSIG(ended[0]) == signal.SIGALRM


def test_a_trial_gives_way_to_the_routers_own_work(monkeypatch):
    """A client that sends a new grammar each time keeps one such process at work."""
    monkeypatch.setattr(os, "nice", os._exit)
    pid = os.fork()
    if pid == 0:
        trial._limit()
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == trial.NICE > 0


def test_a_closed_router_starts_no_process(monkeypatch):
    trials = GrammarTrials("{}", 3, (2,))
    started: list[bytes] = []

    def closed_meanwhile(question):
        started.append(question)
        trials.close()
        return b""

    monkeypatch.setattr(trials, "_ask", closed_meanwhile)
    with pytest.raises(DrainingError):  # the server is killed while the thread waits for it
        trials.find(SPECS)
    assert len(started) == 1


def test_a_stopped_process_of_the_checks_takes_no_thread_for_ever(monkeypatch):
    monkeypatch.setattr(trial, "SERVER_SECONDS", 0.2)
    ours, theirs = os.pipe()
    os.set_blocking(theirs, False)
    try:
        with pytest.raises(OSError, match="hangs"):
            trial._write(theirs, bytes(1 << 20))  # more than a pipe holds
    finally:
        os.close(ours)
        os.close(theirs)
