"""What another tenant notices of all attacks at once: its time to the first token beside that of a calm cluster, its
failed requests, and the router's memory.

Beside it the machine's own limit: the same time to the first token while unrelated processes use the processors as the
attackers did, and the router because of them, at the same times.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import random
import ssl
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil
from rich.table import Table

from baton.client import ClientTls
from baton.local.certs import make_certs
from tests.end_to_end.conftest import run_cluster
from tests.harness.cluster import Cluster
from tests.harness.embedding_files import with_embeddings
from tests.harness.router import KeyFile

MODEL = Path(__file__).parents[3] / "demo" / "model"
FLAGS = ("--pool", "process", "--kv-memory", "256MiB")
CALM_SECONDS = 20.0
ATTACKED_SECONDS = 30.0
CONTROL_SECONDS = 20.0
BETWEEN_SECONDS = 0.25  # requests of the other tenant
PROMPT_TOKENS = 600
REQUEST_SECONDS = 30.0
SECONDS = CALM_SECONDS + ATTACKED_SECONDS + CONTROL_SECONDS + 20  # with start and stop
MAX_RATIO = 1.5
MAX_MEMORY = 1 << 30
STEP_SECONDS = 0.2
# Computes for a share of each step, in turns of 5 ms: the shares come as JSON.
BURN = """
import json, os, sys, time
os.nice(int(sys.argv[1]))
ends = time.monotonic()
for share in json.loads(sys.argv[2]):
    ends += float(sys.argv[3])
    while time.monotonic() < ends:
        pause = time.process_time() + 0.005 * share
        while time.process_time() < pause:
            sum(range(200))
        time.sleep(0.005 * (1 - share))
"""


@dataclass(frozen=True)
class Outcome:
    title: str
    calm: list[float]  # seconds to the first token
    attacked: list[float]
    control: list[float]  # while unrelated processes compute as much
    failures: list[str]
    memory: int  # bytes of the router, at most
    answers: dict[str, int]  # answers to the attackers

    @property
    def ratio(self) -> float:
        return p99(self.attacked) / p99(self.calm)

    @property
    def machine(self) -> float:
        return p99(self.control) / p99(self.calm)

    @property
    def held(self) -> bool:
        return self.ratio <= MAX_RATIO and not self.failures and self.memory <= MAX_MEMORY


def p99(seconds: list[float]) -> float:
    return sorted(seconds)[math.ceil(0.99 * len(seconds)) - 1] if seconds else math.inf


async def tenant(
    http: str, key: str, verify: ssl.SSLContext | bool, seconds: float
) -> tuple[list[float], list[str]]:
    """Requests in even steps, each on a connection of its own and with a prompt of its own."""
    firsts: list[float] = []
    failures: list[str] = []

    async def one() -> None:
        body = {"prompt": [random.randrange(10, 4000) for _ in range(PROMPT_TOKENS)], "max_tokens": 2}
        began = time.monotonic()
        try:
            async with (
                httpx.AsyncClient(verify=verify, timeout=REQUEST_SECONDS) as client,
                client.stream(
                    "POST",
                    f"{http}/v1/completions",
                    json={**body, "stream": True, "ignore_eos": True},
                    headers={"authorization": f"Bearer {key}"},
                ) as answer,
            ):
                if answer.status_code != 200:
                    failures.append(f"{answer.status_code} {(await answer.aread()).decode()[:200]}")
                    return
                lines = [line async for line in _timed(answer, began, firsts)]
            if lines[-1:] != ["data: [DONE]"]:
                failures.append(f"ended with {lines[-1:]}")
        except httpx.HTTPError as error:
            failures.append(f"{type(error).__name__}: {error}")

    tasks = []
    ends = time.monotonic() + seconds
    while time.monotonic() < ends:
        tasks.append(asyncio.create_task(one()))
        await asyncio.sleep(BETWEEN_SECONDS)
    await asyncio.gather(*tasks)
    return firsts, failures


async def _timed(answer: httpx.Response, began: float, firsts: list[float]):  # type: ignore[no-untyped-def]
    first = True
    async for line in answer.aiter_lines():
        if line:
            if first:
                firsts.append(time.monotonic() - began)
                first = False
            yield line


async def measure(cluster: Cluster, title: str, keys: list[str], certs: Path | None) -> Outcome:
    tls = ClientTls(certs / "ca.pem", certs / "client.pem", certs / "client.key") if certs else None
    verify = tls.context() if tls else True
    await tenant(cluster.http, keys[0], verify, 3.0)  # warm
    watched = psutil.Process(cluster.router_pids[0])
    before = _computed(watched)
    calm, failures = await tenant(cluster.http, keys[0], verify, CALM_SECONDS)
    calm_share = (_computed(watched) - before) / CALM_SECONDS
    command = ["-m", "tests.security.attacks.attackers", "--http", cluster.http]
    command += ["--grpc", cluster.grpc, "--keys", *keys[1:], "--seconds", str(ATTACKED_SECONDS + 2)]
    command += ["--certs", str(certs)] if certs else []
    memory, shares = 0, [(0.0, 0.0)]
    attackers = await asyncio.create_subprocess_exec(sys.executable, *command, stdout=asyncio.subprocess.PIPE)
    try:
        both = (watched, psutil.Process(attackers.pid))
        running = asyncio.create_task(tenant(cluster.http, keys[0], verify, ATTACKED_SECONDS))
        last = [_computed(one) for one in both]
        while not running.done():
            await asyncio.sleep(STEP_SECONDS)
            memory = max(memory, watched.memory_info().rss)
            try:
                now = [_computed(one) for one in both]
            except psutil.NoSuchProcess:  # the tenant's last requests take longer than the attacks
                continue
            by_router, by_attackers = ((b - a) / STEP_SECONDS for a, b in zip(last, now, strict=True))
            shares.append((by_router - calm_share, by_attackers))
            last = now
        said, _ = await asyncio.wait_for(attackers.communicate(), 60)
    finally:
        if attackers.returncode is None:
            attackers.kill()
            await attackers.wait()
    attacked, more = running.result()
    router_shares, attacker_shares = zip(*shares, strict=True)
    with _burning(0, router_shares), _burning(19, attacker_shares):
        control, _ = await tenant(cluster.http, keys[0], verify, CONTROL_SECONDS)
    return Outcome(title, calm, attacked, control, failures + more, memory, json.loads(said or "{}"))


def _computed(process: psutil.Process) -> float:
    """Seconds of processor time."""
    times = process.cpu_times()
    return float(times.user + times.system)


@contextlib.contextmanager
def _burning(nice: int, shares: Iterable[float]) -> Iterator[None]:
    within = json.dumps([min(max(share, 0.0), 1.0) for share in shares])
    process = subprocess.Popen([sys.executable, "-c", BURN, str(nice), within, str(STEP_SECONDS)])
    try:
        yield
    finally:
        process.kill()
        process.wait()


def run(title: str, *, mutual_tls: bool) -> Outcome:
    with tempfile.TemporaryDirectory(prefix="baton-together-") as made:
        directory = Path(made)
        keys = KeyFile(directory / "keys.yaml")
        named = [keys.add("tenant"), keys.add("first"), keys.add("second")]
        certs = directory / "certs" if mutual_tls else None
        flags = [*FLAGS, "--api-keys-file", str(keys.path)]
        if certs:
            make_certs(certs, [], 2)
            flags += ["--certs", str(certs)]
        with_embeddings(MODEL, directory / "model")
        with run_cluster(directory / "cluster", directory / "model", *flags) as cluster:
            return asyncio.run(measure(cluster, title, named, certs))


def table(outcomes: list[Outcome]) -> Table:
    made = Table(
        "all attacks at once",
        "TTFT p99, calm",
        "attacked",
        "ratio",
        "machine's own",
        "failed",
        "router's memory",
        "held",
    )
    for one in outcomes:
        made.add_row(
            one.title,
            f"{1000 * p99(one.calm):.0f} ms",
            f"{1000 * p99(one.attacked):.0f} ms",
            f"{one.ratio:.2f}",
            f"{one.machine:.2f}",
            f"{len(one.failures)} of {len(one.attacked) + len(one.failures)}",
            f"{one.memory / (1 << 20):.0f} MiB",
            "[green]yes" if one.held else "[red]NO",
        )
    made.caption = (
        f"of {len(outcomes[0].calm)} and {len(outcomes[0].attacked)} requests; "
        f"asked for: ratio ≤ {MAX_RATIO}, none failed, ≤ {MAX_MEMORY >> 20} MiB; the machine's own ratio is with "
        "unrelated processes that compute as much"
        if outcomes
        else None
    )
    return made
