"""Workers and routers leave while they serve: streams go on token by token, and a draining one gets nothing new."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import secrets
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from baton.client import AsyncClient, AsyncStream, Client, Timings
from cluster.faults.orders import InjectedFault, Order
from cluster.membership.registry import request_drain
from tests.end_to_end.conftest import UnderOrders, run_under_orders
from tests.end_to_end.registries import configs, registry
from tests.harness.checkpoints import prompt_ids
from tests.harness.cluster import Cluster
from tests.harness.exactness import judge
from tests.harness.fault_orders import give_orders, read_injected
from tests.harness.waiting import wait_for

FLAGS = ("--pool", "process", "--dtype", "float32", "--local-prefill", "fallback", "--kv-memory", "64MiB")
LONG = 900
PROMPTS = [prompt_ids(60, seed=seed) for seed in range(9, 17)]
OPTIONS: dict[str, Any] = {"temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def running(checkpoint: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[UnderOrders]:
    """`baton up` starts a new worker for each that leaves."""
    flags = (*FLAGS, "--prefill", "2", "--decode", "3")
    at_once = {"BATON_DRAIN_MIGRATE_SECONDS": "0"}
    with run_under_orders(tmp_path_factory, "drain", checkpoint("llama"), *flags, **at_once) as started:
        yield started


@pytest.fixture(autouse=True)
def enough(running: UnderOrders) -> None:
    wait_for(lambda: len(ready(running.cluster, "decode")) >= 2, 60.0, "a decode worker that can take over")


def ready(cluster: Cluster, role: str) -> list[str]:
    there = [w for w in cluster.workers() if (w["state"], w["lease"]) == ("ready", "live")]
    return [w["id"] for w in there if w["role"] == role]


def pids_of(cluster: Cluster) -> dict[str, int]:
    return {w["id"]: int(w["status"]["pid"]) for w in cluster.workers()}


def drain(cluster: Cluster, *arguments: str) -> subprocess.CompletedProcess[str]:
    url, namespace = registry(cluster)
    redis = ["--redis-url", url, "--namespace", namespace]
    command = [sys.executable, "-m", "baton", "drain", *arguments, *redis]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def assert_exact(model: Path, prompt: list[int], tokens: Any, count: int) -> None:
    assert len(tokens) == count
    assert not judge(model, prompt, list(tokens)).wrong


def assert_left(cluster: Cluster, worker_id: str) -> None:
    wait_for(lambda: worker_id not in {w["id"] for w in cluster.workers()}, 60.0, "it has left")


@contextlib.asynccontextmanager
async def streaming(cluster: Cluster) -> AsyncIterator[list[AsyncStream]]:
    """Streams of PROMPTS that have begun and are read all the while, to their end."""
    async with AsyncClient(cluster.grpc) as client:
        streams = [client.stream(prompt, max_tokens=LONG, **OPTIONS) for prompt in PROMPTS]
        for stream in streams:
            await anext(stream)
        async with asyncio.TaskGroup() as group:
            for stream in streams:
                group.create_task(read_all(stream))
            yield streams


async def read_all(stream: AsyncStream) -> None:
    async for _ in stream:
        pass


@contextlib.asynccontextmanager
async def stopped_midway(running: UnderOrders) -> AsyncIterator[tuple[InjectedFault, list[AsyncStream]]]:
    """A decode worker stops by itself in the middle of its streams; it goes on at the end."""
    order = Order(f"stop-{secrets.token_hex(3)}", "decode.tokens", "stop", at=200)
    give_orders(running.orders, [order])
    async with streaming(running.cluster) as streams:
        injected = await asyncio.to_thread(
            wait_for, lambda: carried_out(running.orders, order), 60.0, "a stop"
        )
        try:
            yield injected, streams
        finally:
            os.kill(injected.pid, signal.SIGCONT)


def carried_out(orders: Path, order: Order) -> InjectedFault | None:
    return next((injected for injected in read_injected(orders) if injected.id == order.id), None)


def timings(stream: AsyncStream) -> Timings:
    found = stream.completion().timings
    assert found is not None
    return found


def assert_all_exact(model: Path, streams: list[AsyncStream]) -> None:
    for prompt, stream in zip(PROMPTS, streams, strict=True):
        assert_exact(model, prompt, stream.completion().token_ids, LONG)


@pytest.mark.long
async def test_streams_of_a_decode_worker_that_gets_sigterm_go_on_elsewhere(running: UnderOrders) -> None:
    async with stopped_midway(running) as (leaving, streams):
        os.kill(leaving.pid, signal.SIGTERM)
    assert_all_exact(running.model, streams)
    # More than twice where the place that a stream was given next had no room, or left as well.
    moved = [stream for stream in streams if timings(stream).attempts > 1]
    assert moved, [(timings(stream).attempts, timings(stream).decode_worker, leaving) for stream in streams]
    assert leaving.process not in {timings(stream).decode_worker for stream in moved}
    assert_left(running.cluster, leaving.process)


@pytest.mark.long
async def test_nothing_is_placed_on_a_worker_from_its_drain_request_on(running: UnderOrders) -> None:
    """It has not noticed yet: it is stopped, in the middle of its streams."""
    cluster = running.cluster
    async with stopped_midway(running) as (leaving, streams):
        assert request_drain(*registry(cluster), leaving.process)
        async with AsyncClient(cluster.grpc) as client:
            for prompt in PROMPTS:  # those of the worker's own streams are cached there: it looks best
                answer = await client.generate(prompt, max_tokens=4, **OPTIONS)
                assert answer.timings is not None and answer.timings.decode_worker != leaving.process
                assert answer.timings.attempts == 1
        assert not request_drain(*registry(cluster), leaving.process)  # once is enough
    assert_all_exact(running.model, streams)
    assert_left(cluster, leaving.process)
    unknown = drain(cluster, leaving.process)
    assert unknown.returncode == 1 and "registered are:" in unknown.stderr


def test_prefill_workers_leave_under_load(running: UnderOrders) -> None:
    model, cluster = running.model, running.cluster
    leaving = ready(cluster, "prefill")[0]
    prompts = [prompt_ids(40 + 37 * i, seed=200 + i) for i in range(12)]

    async def load() -> list[Any]:
        async with AsyncClient(cluster.grpc) as client:
            work = [
                asyncio.create_task(client.generate(prompt, max_tokens=24, **OPTIONS)) for prompt in prompts
            ]
            await asyncio.sleep(0)
            assert await asyncio.to_thread(request_drain, *registry(cluster), leaving)
            return await asyncio.gather(*work)

    for prompt, answer in zip(prompts, asyncio.run(load()), strict=True):
        assert_exact(model, prompt, answer.token_ids, 24)
    assert_left(cluster, leaving)


@pytest.mark.long
def test_a_draining_router_finishes_its_streams_and_takes_nothing_new(
    running: UnderOrders, tmp_path: Path
) -> None:
    model, cluster = running.model, running.cluster
    with router_beside(cluster, model, tmp_path / "router.json") as (process, facts):
        prompt = prompt_ids(60, seed=31)
        with Client(facts["grpc"]) as client:
            stream = client.stream(prompt, max_tokens=LONG, **OPTIONS)
            next(stream)
            decode = next(worker for worker in stream.worker_ids if worker.startswith("decode"))
            pid = pids_of(cluster)[decode]  # now: a successor may have registered after the router started
            os.kill(pid, signal.SIGSTOP)  # so that the stream is still there whatever the rest takes
            try:
                # As the preStop hook of its pod does it.
                assert drain(cluster, "--self", "--ready-file", str(tmp_path / "router.json")).returncode == 0
                status, why = wait_for(lambda: refused(facts), 60.0, "not ready")
                assert status == 503 and why == ["draining: this router leaves"]
                assert probe(facts, "live")[0] == 200
                assert ask(facts, model.name) == (503, "1")
            finally:
                os.kill(pid, signal.SIGCONT)
            list(stream)
            assert_exact(model, prompt, stream.completion().token_ids, LONG)
        assert process.wait(20) == 0


@contextlib.contextmanager
def router_beside(
    cluster: Cluster, model: Path, ready_file: Path
) -> Iterator[tuple[subprocess.Popen[bytes], dict[str, Any]]]:
    """One more router of the cluster's."""
    url, namespace = registry(cluster)
    command = [
        sys.executable,
        "-m",
        "baton",
        "router",
        "--model",
        str(model),
        "--ready-file",
        str(ready_file),
    ]
    command += ["--http-port", "0", "--grpc-port", "0", "--redis-url", url, "--namespace", namespace]
    process = subprocess.Popen(command, env={**os.environ, "BATON_SECRET": configs(cluster)[0]["secret"]})
    try:
        wait_for(ready_file.exists, 60.0, "the router listens")
        facts = json.loads(ready_file.read_text())
        wait_for(lambda: probe(facts, "ready")[0] == 200, 60.0, "ready")
        yield process, facts
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()


def probe(facts: dict[str, Any], name: str) -> tuple[int, list[str]]:
    try:
        with urllib.request.urlopen(f"{facts['http']}/{name}", timeout=60) as answer:
            return answer.status, json.load(answer)["why"]
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.load(error)["why"]


def refused(facts: dict[str, Any]) -> tuple[int, list[str]] | None:
    status, why = probe(facts, "ready")
    return (status, why) if status == 503 else None


def ask(facts: dict[str, Any], model: str) -> tuple[int, str | None]:
    """Status and Retry-After of a request."""
    body = json.dumps({"model": model, "prompt": "a", "max_tokens": 1}).encode()
    url = f"{facts['http']}/v1/completions"
    request = urllib.request.Request(url, body, {"content-type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, None
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.headers["retry-after"]


@pytest.mark.long
async def test_without_another_one_streams_finish_where_they_are(running: UnderOrders) -> None:
    """The last one here: it leaves the cluster without a decode worker for a while."""
    cluster = running.cluster
    os.kill(cluster.process.pid, signal.SIGSTOP)  # no new workers are started
    try:
        async with streaming(cluster) as streams:
            # Together: a worker that sees another one still ready returns what has not begun there, for that other one.
            marks = [
                asyncio.to_thread(request_drain, *registry(cluster), one) for one in ready(cluster, "decode")
            ]
            assert all(await asyncio.gather(*marks))
    finally:
        os.kill(cluster.process.pid, signal.SIGCONT)
    assert_all_exact(running.model, streams)
    assert {timings(stream).attempts for stream in streams} == {1}
