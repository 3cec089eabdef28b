"""A cluster whose processes are the users of the chart's Redis: whatever they do, Redis refuses none of their commands."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import httpx
import pytest
from prometheus_client import CollectorRegistry

from baton.autoscaler.autoscaler import Autoscaler
from baton.autoscaler.config import AutoscalingConfig
from baton.autoscaler.platforms.base import PlatformPool
from baton.client import Client, Completion
from cluster.config.worker import Role
from cluster.errors import OverloadedError
from cluster.redis.connect import connect
from tests.harness.checkpoints import prompt_ids
from tests.harness.router import KeyFile
from tests.harness.router_process import python
from tests.harness.waiting import wait_for
from tests.system.helm.chart_redis import NAMESPACE, ChartRedis, run_chart_redis
from tests.system.helm.rendering import Renderer

pytestmark = [pytest.mark.system, pytest.mark.timeout(600)]
WORKERS = {"prefill-1": "prefill", "decode-1": "decode", "decode-2": "decode"}
START_SECONDS = 240
TAG = f"{{{NAMESPACE}}}:"


@dataclass(frozen=True)
class Running:
    redis: ChartRedis
    keys: KeyFile
    admin_key: str
    http: str
    grpc: str
    logs: tuple[Path, ...]
    pids: tuple[int, ...]

    def workers(self) -> list[dict[str, Any]]:
        headers = {"authorization": f"Bearer {self.admin_key}"}
        found = httpx.get(f"{self.http}/v1/cluster", headers=headers, timeout=10).json()["workers"]
        return [one for one in found if (one["state"], one["lease"]) == ("ready", "live")]

    def generate(self, seed: int, **more: Any) -> Completion:
        with Client(self.grpc, api_key=self.admin_key) as client:
            return client.generate(prompt_ids(70, seed=seed), max_tokens=4, explain=True, **more)


@contextlib.contextmanager
def _process(redis_url: str, role: str, file: Path, config: dict[str, Any]) -> Iterator[int]:
    """The address of Redis comes by the environment, as in the chart's pods."""
    common = {"namespace": NAMESPACE, "secret": "of this test"}
    file.write_text(json.dumps({**common, **config}))
    arguments = ["-m", "baton", role, "--config", str(file), "--ready-file", str(file.with_suffix(".ready"))]
    environment = {"BATON_REDIS_URL": redis_url, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
    with mock.patch.dict(os.environ, environment):
        process = python(*arguments, log=file.with_suffix(".log"))
        entered = process.__enter__()
    try:
        yield entered.pid
    finally:
        process.__exit__(None, None, None)


@pytest.fixture(scope="module")
def running(
    renderer: Renderer, checkpoint: Any, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Running]:
    directory = tmp_path_factory.mktemp("users")
    model = checkpoint("llama")
    keys = KeyFile(directory / "keys.yaml")
    admin_key = keys.add("ops", admin=True)
    engine = {"model": str(model), "dtype": "float32", "kv_memory_bytes": 64 << 20}
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(run_chart_redis(renderer, directory / "redis"))
        router = {"model": str(model), "http_port": 0, "grpc_port": 0, "api_keys_file": str(keys.path)}
        router |= {"local_prefill": "never"}
        pids = [
            stack.enter_context(_process(server.urls["router"], "router", directory / "router.json", router))
        ]
        for name, role in WORKERS.items():
            config = {"worker_id": name, "engine": engine, "drain_migrate_seconds": 0}
            file = directory / f"{name}.json"
            pids.append(stack.enter_context(_process(server.urls["worker"], role, file, config)))
        ready = directory / "router.ready"
        wait_for(ready.exists, START_SECONDS, f"the router is ready: {directory}")
        facts = json.loads(ready.read_text())
        logs = tuple(directory / f"{name}.log" for name in ("router", *WORKERS))
        made = Running(server, keys, admin_key, facts["http"], facts["grpc"], logs, tuple(pids))
        wait_for(lambda: len(made.workers()) == 3, START_SECONDS, f"three workers: {directory}")
        yield made


@pytest.fixture(autouse=True)
def nothing_is_refused(running: Running) -> Iterator[None]:
    yield
    assert running.redis.refusals() == []


def test_requests_are_placed_handed_over_and_found_again(running: Running) -> None:
    first, again = running.generate(1), running.generate(1)
    for answer in (first, again):
        assert answer.explanation is not None and json.loads(answer.explanation)[0]["from_redis"] is True
        assert answer.timings is not None
        assert answer.timings.prefill_worker == "prefill-1"
        assert answer.timings.decode_worker in ("decode-1", "decode-2")
    assert again.usage is not None and again.usage.cached_tokens > 0
    with connect(running.redis.admin) as admin:
        confirmed = f"{TAG}index:*"
        wait_for(lambda: admin.keys(confirmed), 30, "the index has nodes")
        assert int(admin.get(f"{TAG}calls") or 0) >= 2
        wait_for(lambda: admin.exists(f"{TAG}router_reports"), 30, "the live view is exchanged")


def test_quotas_are_charged_and_settled(running: Running) -> None:
    key = running.keys.add("few", requests_per_minute=1)
    with Client(running.grpc, api_key=key) as client:

        def admitted() -> bool:
            try:
                client.generate("abc", max_tokens=2)
            except OverloadedError:
                return True
            except Exception:  # the new key has not been read
                return False
            return False

        wait_for(admitted, 60, "the second request is refused")
    with connect(running.redis.admin) as admin:
        wait_for(lambda: admin.zcard(f"{TAG}quota-applied") >= 2, 30, "charged and settled")
        assert admin.exists(f"{TAG}quota:few")


def test_the_autoscaler_reads_and_leads(running: Running) -> None:
    class Pools:
        def read(self, role: Role) -> PlatformPool:
            return PlatformPool(target=2 if role == "decode" else 1)

        def scale(self, role: Role, replicas: int, seen: PlatformPool) -> None:
            pass

        def close(self) -> None:
            pass

    registry = CollectorRegistry()
    scaler = Autoscaler(
        AutoscalingConfig(gpu_budget=4), running.redis.urls["autoscaler"], NAMESPACE, Pools(), registry
    )
    assert scaler.step() is not None
    assert registry.get_sample_value("baton_autoscaling_leader") == 1
    scaler.leadership.close()
    with connect(running.redis.admin) as admin:
        assert not admin.exists(f"{TAG}autoscaler")


def test_leftovers_of_the_dead_are_swept(running: Running) -> None:
    """A worker without a lease, a router whose lease ran out, quota records past their time."""
    with connect(running.redis.admin) as admin:
        admin.hset(f"{TAG}members", "gone", '{"slot": 4000}')
        admin.hset(f"{TAG}owners", "4000", "gone@1")
        admin.zadd(f"{TAG}routers", {"dead": 1})
        admin.hset(f"{TAG}chg:dead", "d:gone@1", 7)
        admin.hset(f"{TAG}answers:dead", "run", 1)
        admin.hset(f"{TAG}load", "d:gone@1", 7)
        admin.set(f"{TAG}quota-request:old", 1)
        admin.zadd(f"{TAG}quota-expiry", {f"{TAG}quota-request:old": 1})
        admin.hset(f"{TAG}router_reports", "dead", "1 x")
        wait_for(lambda: not admin.hexists(f"{TAG}members", "gone"), 30, "the worker is forgotten")
        wait_for(lambda: not admin.exists(f"{TAG}chg:dead"), 30, "the charges are dropped")
        wait_for(lambda: not admin.hexists(f"{TAG}router_reports", "dead"), 30, "the report is dropped")
        key = running.keys.add("sweeper", requests_per_minute=1000)

        def swept() -> bool:
            httpx.post(
                f"{running.http}/v1/completions",
                json={"prompt": "abc", "max_tokens": 1},
                headers={"authorization": f"Bearer {key}"},
                timeout=30,
            )
            return not admin.exists(f"{TAG}quota-request:old")

        wait_for(swept, 60, "the quota record is dropped")


def test_an_emptied_redis_is_filled_again(running: Running) -> None:
    with connect(running.redis.admin) as admin:
        admin.flushall()
        wait_for(lambda: admin.hlen(f"{TAG}members") == 3, 60, "all have registered again")
    wait_for(lambda: len(running.workers()) == 3, 60, "and the router sees them")
    running.generate(2)
    assert (running.generate(2).usage or pytest.fail("no usage")).cached_tokens > 0


def test_a_worker_drains_by_its_own_users_rights(running: Running) -> None:
    told = subprocess.run(
        [sys.executable, "-m", "baton", "drain", "decode-2", "--wait", "60", "--namespace", NAMESPACE],
        env={**os.environ, "BATON_REDIS_URL": running.redis.urls["worker"]},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert told.returncode == 0, told.stdout + told.stderr
    wait_for(lambda: {one["id"] for one in running.workers()} == {"prefill-1", "decode-1"}, 30, "it has left")
    assert running.generate(3).timings is not None
    refused = subprocess.run(
        [sys.executable, "-m", "baton", "drain", "decode-1", "--namespace", NAMESPACE],
        env={**os.environ, "BATON_REDIS_URL": running.redis.urls["autoscaler"], "COLUMNS": "400"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    running.redis.forget_refusals()
    assert refused.returncode == 1
    assert "draining needs the rights of a worker or a router" in refused.stderr


def test_no_password_is_shown(running: Running) -> None:
    logs = "".join(file.read_text() for file in running.logs)
    lines = b"".join(Path(f"/proc/{pid}/cmdline").read_bytes() for pid in running.pids[:3])
    lines += Path(f"/proc/{running.redis.pid}/cmdline").read_bytes().partition(b"--user")[0]
    for name in ("router", "worker", "autoscaler"):
        password = running.redis.passwords[name]
        assert password not in logs and password.encode() not in lines
    assert "too few rights" not in logs
