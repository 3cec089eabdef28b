"""`/metrics`, the live view and probes of a router of two processes, whichever answers, while processes end."""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from baton.processes.ports import free_ports
from tests.harness.router_group import RouterGroup, answered, grown, parse, run_group
from tests.harness.waiting import until, wait_for
from tests.observability.scraped import differences

AT_ONCE = ("bench.probes.token_stubs", "--pairs", "1", "--gap", "0.001")


@pytest.fixture
def port() -> int:
    (port,) = free_ports(1)
    return port


@pytest.fixture
def group(router_model: Path, tmp_path: Path, port: int) -> Iterator[RouterGroup]:
    with run_group(tmp_path, router_model, 2, AT_ONCE, metrics_port=port) as running:
        yield running


async def ask(group: RouterGroup, count: int) -> None:
    """Each over a connection of its own."""
    body = {"prompt": "abc", "max_tokens": 2}
    for _ in range(count):
        async with httpx.AsyncClient(trust_env=False) as client:
            (await client.post(f"{group.http}/v1/completions", json=body)).raise_for_status()


@pytest.mark.long
async def test_the_sum_is_that_of_the_processes_in_the_form_of_one_router(
    group: RouterGroup, port: int
) -> None:
    await ask(group, 20)
    url = f"http://127.0.0.1:{port}"
    async with httpx.AsyncClient() as client:
        own = [answered(parse((await client.get(f"{url}/metrics/{index}")).text)) for index in (0, 1)]
        merged = (await client.get(f"{url}/metrics")).text
        assert (await client.get(f"{url}/ready")).json()["router"] == "group"
        assert (await client.get(f"{url}/live")).status_code == 200
    assert sum(own) == 20 and all(own), own
    assert answered(parse(merged)) == 20
    found = differences(merged, "router")
    assert found == [], "\n".join(found)
    await until(lambda: group.view()["requests"] == 20, "all are counted")


@pytest.mark.long
async def test_no_counter_falls_while_processes_die(group: RouterGroup) -> None:
    seen: list[Any] = [await asyncio.to_thread(group.samples)]
    over = asyncio.Event()

    async def watch() -> None:
        while not over.is_set():
            try:
                shown = await asyncio.to_thread(group.samples)
            except OSError:  # the process that answered was killed
                continue
            fallen = {key for key, value in grown(seen[-1]).items() if shown.get(key, 0) < value}
            assert not fallen, {key: (seen[-1][key], shown.get(key)) for key in fallen}
            seen.append(shown)

    watching = asyncio.create_task(watch())
    for index in (0, 1):
        await ask(group, 10)
        enough = 10 * (index + 1) - 10
        await until(lambda least=enough: answered(seen[-1]) >= least or watching.done(), "it is shown")
        before = group.signal(index, signal.SIGKILL)
        await until(lambda i=index, b=before: group.pids()[i] not in (0, b) or watching.done(), "replaced")
    await ask(group, 5)
    over.set()
    await watching
    assert 5 <= answered(seen[-1]) <= 25, "none is counted twice"
    assert seen[-1]["baton_process_restarts_total", ()] == 2


def test_the_live_view_shows_every_process_whichever_answers(group: RouterGroup) -> None:
    def shown() -> bool:
        view = json.loads(group.get("/v1/cluster/live")[1])
        states = {one["id"]: one["state"] for one in view["routers"]}
        return states == {"group/0": "ready", "group/1": "ready"}

    for _ in range(4):
        wait_for(shown, 20, "both are shown")
