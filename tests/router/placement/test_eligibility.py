"""No request is placed on a worker with a reason against it, unless every worker has one; `explain` names the reasons."""

from __future__ import annotations

import asyncio
import json
import random
import threading
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.config.router import RouterConfig
from cluster.config.worker import Role
from cluster.errors import UnavailableError
from cluster.membership.types import WorkerInfo
from cluster.protocol.link import LINK_VERSION, MIN_LINK_VERSION
from router.placement import placement as placing
from router.placement.candidates import Heads
from router.placement.eligibility import Eligibility
from router.placement.kv_groups import kv_group_of
from router.placement.placement import Placement
from router.placement.types import Mode, Placed, PlacementRequest, Reason
from tests.router.placement.fleets import fleet

INFO = WorkerInfo("", 1, 0, "prefill", "m", "h:1", "", b"", "", "h", 4096, 100)
STANDING = {Reason.ROLE, Reason.DRAINING, Reason.SUSPECT, Reason.DEAD, Reason.KV_GROUP, Reason.LINK}
EXCLUSIONS = sorted(set(Reason) - STANDING)
ROLES: tuple[Role, Role] = ("prefill", "decode")
MODES = st.sampled_from(["never", "fallback", "auto", "always"])
REACHED: Counter[str] = Counter()


@st.composite
def fleets(draw: st.DrawFn) -> list[WorkerInfo]:
    return [
        replace(
            INFO,
            worker_id=f"{role}-{number}",
            slot=slot,
            role=role,
            page_size=draw(st.sampled_from([16, 16, 16, 32])),
            state=draw(st.sampled_from(["ready", "ready", "ready", "draining"])),
            lease=draw(st.sampled_from(["live", "live", "suspect", "dead"])),
            link_max_version=draw(st.sampled_from([LINK_VERSION] * 5 + [0])),  # 0: from before the link
        )
        for slot, (role, number) in enumerate(
            [(role, number) for role in ROLES for number in range(draw(st.integers(0, 4)))], 1
        )
    ]


@st.composite
def exclusions(draw: st.DrawFn) -> dict[str, Reason]:
    """By id or by life; of workers that are not there, too."""
    names = [f"{role}-{number}" for role in ROLES for number in range(4)]
    lives = [f"{name}@{epoch:016x}" for name in names for epoch in (1, 2)]
    return draw(st.dictionaries(st.sampled_from([*names, *lives]), st.sampled_from(EXCLUSIONS)))


def standing(worker: WorkerInfo, workers: list[WorkerInfo], mode: Mode, page_size: int) -> bool:
    """Whether it may get any request of this KV group."""
    ready = [
        one
        for one in workers
        if one.role == worker.role and one.state == "ready" and one.link_max_version >= MIN_LINK_VERSION
    ]
    leases = [one.lease for one in ready]
    best = "live" if "live" in leases else "suspect" if "suspect" in leases else "dead"
    wanted = worker.role == "decode" or mode != "always"
    return worker in ready and worker.lease == best and wanted and worker.page_size == page_size


def place(workers: list[WorkerInfo], mode: Mode, request: PlacementRequest) -> Placed | None:
    """By a router that has no Redis; None where a role has no worker."""

    async def run() -> Placed | None:
        members: Any = SimpleNamespace(all=workers)
        config = RouterConfig(model=Path("/m"), redis_url="redis://127.0.0.1:1", local_prefill=mode)
        try:
            return await Placement(config, members, random.Random(1)).place(request)
        except UnavailableError:
            return None

    return asyncio.run(run())


@settings(max_examples=400, deadline=None)
@given(workers=fleets(), mode=MODES, excluded=exclusions())
def test_no_worker_is_taken_against_a_reason_unless_all_have_one(workers, mode, excluded):
    eligibility = Eligibility(workers, mode)
    request = PlacementRequest(b"t", b"", 100, 10, excluded, kv_group_of(INFO), explain=True)
    reasons = {one.worker_id: eligibility.why_not(one, request) for one in workers}
    for worker in workers:
        reason = reasons[worker.worker_id]
        good = standing(worker, workers, mode, 16)
        assert good == (reason not in STANDING), (worker, reason)
        if good:
            assert reason == (excluded.get(worker.worker_id) or excluded.get(worker.name))
    candidates = eligibility.candidates(request)
    for role, taken in (("prefill", candidates.prefill), ("decode", candidates.decode)):
        fit = [one for one in workers if one.role == role and standing(one, workers, mode, 16)]
        eligible = [one for one in fit if reasons[one.worker_id] is None]
        having = [one for one in fit if reasons[one.worker_id] is not Reason.ADAPTER]
        # Decode workers prefill
        instead = [] if role == "prefill" and mode != "never" else having or fit
        assert taken == (eligible or instead)
        REACHED[f"{role}: all excluded"] += bool(fit and not eligible)
    placed = place(workers, mode, request)
    if placed is None:
        REACHED["unavailable"] += 1
        return
    told = json.loads(json.dumps(placed.explanation))["why_not"]
    assert told == {name: str(reason) for name, reason in reasons.items() if reason is not None}
    for one in (placed.prefill, placed.decode):
        if one is not None and one.worker_id in told:
            REACHED["taken all the same"] += 1
            fit = [w for w in workers if w.role == one.role and standing(w, workers, mode, 16)]
            assert one in fit and all(w.worker_id in told for w in fit)


def test_every_case_was_reached():
    for what in ("prefill: all excluded", "decode: all excluded", "taken all the same", "unavailable"):
        assert REACHED[what] > 0, REACHED


LACKING, FULL = {f"{role}-{n}": Reason.ADAPTER for role in ROLES for n in range(1, 70)}, Reason.REFUSED


def asked(excluded: dict[str, Reason]) -> PlacementRequest:
    return PlacementRequest(b"t", b"", 100, 10, excluded, kv_group_of(INFO))


@pytest.mark.parametrize("pairs", [2, 70])
def test_the_one_worker_with_the_adapter_is_asked_again_once_it_was_full(pairs: int) -> None:
    """All others were asked in its place: they have the least load, and never the adapter."""
    workers = fleet(pairs).all
    excluded = {
        name: reason for name, reason in LACKING.items() if name in {one.worker_id for one in workers}
    }
    eligibility = Eligibility(workers, "never")
    for more in ({}, {"decode-0": FULL}, {"decode-0": FULL, "prefill-0": Reason.SILENT}):
        request = asked(excluded | more)
        candidates = eligibility.candidates(request)
        assert [one.worker_id for one in candidates.prefill + candidates.decode] == ["prefill-0", "decode-0"]
        for_script = eligibility.for_script(request, listed=False)
        if pairs == 2:
            assert for_script.arguments == candidates.arguments
            continue
        assert isinstance(for_script, Heads)
        passed = [set(one.decode().split("\0")[1:]) for one in for_script.arguments[2:4]]
        assert passed == [
            {one.name for one in workers if one.role == role and one.worker_id != f"{role}-0"}
            for role in ROLES
        ]


def test_candidates_are_kept_for_the_same_reasons_only() -> None:
    eligibility = Eligibility(fleet(2).all, "never")
    for having in (0, 1, 0):
        excluded = {f"decode-{having}": FULL, f"decode-{1 - having}": Reason.ADAPTER}
        for found in (eligibility.candidates(asked(excluded)), eligibility.usable("decode", asked(excluded))):
            decode = found if isinstance(found, list) else found.decode
            assert [one.worker_id for one in decode] == [f"decode-{having}"]


def test_a_scrape_forgets_nothing_that_a_placement_has_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """It reads the workers on a thread of its own, and may be the first that sees a new membership."""
    members = fleet(2)
    placement = Placement(RouterConfig(model=Path("/m"), redis_url="redis://127.0.0.1:1"), members)
    assert placement.eligibility.workers is members.all
    scraping, go_on = threading.Event(), threading.Event()

    def slowly(*arguments: Any) -> Eligibility:
        if not scraping.is_set():
            scraping.set()
            go_on.wait(10)
        return Eligibility(*arguments)

    monkeypatch.setattr(placing, "Eligibility", slowly)
    members.all = list(members.all)
    scrape = threading.Thread(target=lambda: placement.eligibility)
    scrape.start()
    assert scraping.wait(10)
    threading.Timer(0.1, go_on.set).start()
    placement.eligibility.pass_over({"decode-9@0000000000000001": "decode"})
    go_on.set()
    scrape.join()
    assert placement.eligibility.unknown == {"decode-9@0000000000000001": "decode"}
