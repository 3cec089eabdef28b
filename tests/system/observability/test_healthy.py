"""The metrics of a healthy cluster: every metric named anywhere, data in every panel, no alert."""

from __future__ import annotations

import json
import math
import re
import time

import pytest

from cluster.telemetry.metrics.declaration import Process
from deploy.observability import boards, dashboards
from tests.harness.waiting import wait_for
from tests.observability.scraped import differences, scrape
from tests.system.observability.conftest import HEALTHY_SECONDS, Watched
from tests.system.observability.debian_prometheus import promtool
from tests.system.observability.rules import (
    FILES,
    RUNBOOKS,
    alert_files,
    alerts,
    dashboard_queries,
    metrics_in,
)

pytestmark = pytest.mark.system


def test_rules_are_valid_and_each_alert_has_a_runbook() -> None:
    promtool("check", "rules", *map(str, alert_files()))
    names = [rule["alert"] for rule in alerts()]
    assert len(names) == len(set(names)) > 20
    assert {path.stem for path in RUNBOOKS.glob("*.md")} == set(names)
    for rule in alerts():
        assert rule["labels"]["severity"] in ("critical", "warning", "info")
        assert rule["annotations"]["runbook"] == f"docs/runbooks/{rule['alert']}.md"
        runbook = (RUNBOOKS / f"{rule['alert']}.md").read_text()
        assert runbook.startswith(f"# {rule['alert']}\n")
        assert all(heading in runbook for heading in ("## What it means", "## How to look", "## What to do"))


def test_dashboards_are_what_their_code_makes() -> None:
    written = {path.stem: path.read_text() for path in (FILES / "dashboards").glob("*.json")}
    assert written == {board.name: dashboards.text(board) for board in boards.all_boards()}
    for text in written.values():
        panels = json.loads(text)["panels"]
        assert len({panel["id"] for panel in panels}) == len(panels)


def test_every_metric_that_is_named_is_scraped(healthy: Watched) -> None:
    known = healthy.prometheus.names()
    known |= {name.removesuffix("_count") for name in known}  # a runbook may name a whole histogram
    named = {metric for shown in dashboard_queries() for metric in metrics_in(shown.expr)}
    named |= {metric for rule in alerts() for metric in metrics_in(rule["expr"])}
    for runbook in RUNBOOKS.glob("*.md"):
        named |= {m for code in re.findall(r"`([^`]+)`", runbook.read_text()) for m in metrics_in(code)}
    assert len(named) > 60
    assert named <= known, f"no process exports {sorted(named - known)}"


def test_every_dashboard_query_returns_data(healthy: Watched) -> None:
    queries = list(dashboard_queries())
    assert len(queries) > 70

    def empty() -> list[str]:
        return [shown.where for shown in queries if not _has_data(healthy, shown.expr)]

    wait_for(lambda: not empty(), 30, f"data for {empty()}")


def _has_data(healthy: Watched, expr: str) -> bool:
    values = [float(one["value"][1]) for one in healthy.prometheus.query(expr)]
    return any(not math.isnan(value) for value in values)


WINDOW_SECONDS = 15.0  # of the hurried rules: what they look at began earlier
SLOW_SECONDS = 0.05  # a call of placement that the alert warns of


def late_loops(healthy: Watched, seconds: float) -> bool:
    """Whether the loop of any process was late by as much, once. A window of the hurried rules has a hundred calls at
    most: the slowest one is their 99th percentile."""
    bucket = "sum by (instance) (increase(baton_event_loop_lag_seconds_bucket{le%s}[%ds]))"
    every, in_time = (bucket % (le, seconds) for le in ('="+Inf"', f'="{SLOW_SECONDS}"'))
    assert healthy.prometheus.query(in_time), "no such bucket"
    return bool(healthy.prometheus.query(f"{every} - {in_time} > 0"))


def test_no_alert_fires(healthy: Watched) -> None:
    """But that placing is slow, where the machine's other work kept an event loop waiting as long as it warns of."""
    seconds = time.monotonic() - healthy.began
    assert seconds > HEALTHY_SECONDS
    excused = {"BatonPlacementSlow"} if late_loops(healthy, seconds + WINDOW_SECONDS) else set()
    assert healthy.prometheus.has_fired(seconds) - excused == set()


def test_each_process_shows_the_metrics_that_are_declared_for_it(healthy: Watched) -> None:
    """The list of metrics is made from the declarations."""
    processes: tuple[Process, ...] = ("router", "prefill", "decode", "autoscaler")
    for target, process in zip(healthy.targets, processes, strict=True):
        assert differences(scrape(target), process) == []


def test_exemplars_lead_to_traces(healthy: Watched) -> None:
    def linked() -> bool:
        found = healthy.prometheus.exemplars("baton_time_to_first_token_seconds_bucket")
        named = {one["labels"]["trace_id"] for series in found for one in series["exemplars"]}
        return bool(named & set(healthy.collector.traces()))

    wait_for(linked, 30, "an exemplar names a trace that was collected")


def test_vllm_names_show_the_same(healthy: Watched) -> None:
    """Where they were asked for; scrapers of vLLM find their labels too."""
    for ours, theirs in (
        ("baton_kv_cache_usage_ratio", "vllm:kv_cache_usage_perc"),
        ("baton_requests_running", "vllm:num_requests_running"),
        ("baton_preemptions_total", "vllm:num_preemptions_total"),
        (
            'baton_time_to_first_token_seconds_bucket{le="+Inf"}',
            'vllm:time_to_first_token_seconds_bucket{le="+Inf"}',
        ),
    ):
        assert healthy.prometheus.query(f"{theirs} - ignoring(model_name, model) {ours} == 0"), theirs
    assert healthy.prometheus.query('vllm:request_queue_time_seconds_count{model_name!=""} > 0')
