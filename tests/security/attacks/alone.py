"""Which attack delays another tenant most: each alone beside it, in pairs of a calm and an attacked stretch of the same
minute, with the processor time of the router, the workers and the attackers meanwhile."""

from __future__ import annotations

import asyncio
import json
import ssl
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil
from rich.table import Table

from tests.end_to_end.conftest import run_cluster
from tests.harness.cluster import Cluster
from tests.harness.router import KeyFile
from tests.security.attacks.together import FLAGS, MODEL, p99, tenant

STRETCH_SECONDS = 4.0
BEGIN_SECONDS = 1.5  # of the attackers: start, and their first connections
REST_SECONDS = 1.5  # after an attack, for what is still queued
PAIRS = 2


@dataclass(frozen=True)
class Stretch:
    firsts: list[float]  # seconds to the first token
    failures: list[str]
    router: float  # share of a core
    workers: float


@dataclass(frozen=True)
class Pairs:
    name: str
    calm: list[Stretch]
    attacked: list[Stretch]
    answers: dict[str, int]

    def ratio(self, of: str) -> float:
        """Of the medians ("p50") or of the slowest 1 % ("p99") of both kinds of stretches, all pairs together."""
        value = p99 if of == "p99" else statistics.median
        firsts = [[first for one in some for first in one.firsts] for some in (self.attacked, self.calm)]
        return value(firsts[0]) / value(firsts[1]) if all(firsts) else float("inf")

    def median_ratio(self) -> float:
        return self.ratio("p50")


class Watch:
    def __init__(self, cluster: Cluster):
        self._router = [psutil.Process(pid) for pid in cluster.router_pids]
        self._workers = [psutil.Process(pid) for pid in cluster.worker_pids]

    def computed(self) -> tuple[float, float]:
        """Seconds of processor time of the routers, and of the workers."""
        return _seconds(self._router), _seconds(self._workers)


def _seconds(processes: Sequence[psutil.Process]) -> float:
    return sum(times.user + times.system for times in (one.cpu_times() for one in processes))


async def stretch(cluster: Cluster, key: str, verify: ssl.SSLContext | bool = True) -> Stretch:
    watch = Watch(cluster)
    before = watch.computed()
    loop = asyncio.get_running_loop()
    began = loop.time()
    firsts, failures = await tenant(cluster.http, key, verify, STRETCH_SECONDS)
    took = loop.time() - began
    router, workers = (
        (after - earlier) / took for earlier, after in zip(before, watch.computed(), strict=True)
    )
    return Stretch(firsts, failures, router, workers)


async def pairs_of(cluster: Cluster, name: str, keys: list[str], pairs: int = PAIRS) -> Pairs:
    found = Pairs(name, [], [], {})
    for _ in range(pairs):
        found.calm.append(await stretch(cluster, keys[0]))
        command = ["-m", "tests.security.attacks.attackers", "--http", cluster.http, "--grpc", cluster.grpc]
        command += [
            "--keys",
            *keys[1:],
            "--seconds",
            str(BEGIN_SECONDS + STRETCH_SECONDS + 1),
            "--only",
            name,
        ]
        attackers = await asyncio.create_subprocess_exec(
            sys.executable, *command, stdout=asyncio.subprocess.PIPE
        )
        try:
            await asyncio.sleep(BEGIN_SECONDS)
            found.attacked.append(await stretch(cluster, keys[0]))
            said, _ = await asyncio.wait_for(attackers.communicate(), 60)
        finally:
            if attackers.returncode is None:
                attackers.kill()
                await attackers.wait()
        for answer, count in json.loads(said or "{}").items():
            found.answers[answer] = found.answers.get(answer, 0) + count
        await asyncio.sleep(REST_SECONDS)
    return found


def run(names: Sequence[str], pairs: int = PAIRS) -> list[Pairs]:
    with tempfile.TemporaryDirectory(prefix="baton-alone-") as made:
        directory = Path(made)
        keys = KeyFile(directory / "keys.yaml")
        named = [keys.add("tenant"), keys.add("first"), keys.add("second")]
        with run_cluster(directory / "cluster", MODEL, *FLAGS, "--api-keys-file", str(keys.path)) as cluster:
            return asyncio.run(_each(cluster, names, named, pairs))


async def _each(cluster: Cluster, names: Sequence[str], keys: list[str], pairs: int) -> list[Pairs]:
    await tenant(cluster.http, keys[0], True, 3.0)  # warm
    found = []
    for name in names:
        found.append(await pairs_of(cluster, name, keys, pairs))
        one = found[-1]
        print(f"  {name}: p50 {one.median_ratio():.2f}, p99 {one.ratio('p99'):.2f} {one.answers}", flush=True)
    return found


def table(found: Sequence[Pairs]) -> Table:
    made = Table("attack alone", "p50 calm", "p50 ratio", "p99 ratio", "router", "workers", "failed")
    for one in found:
        calm = [first for part in one.calm for first in part.firsts]
        cells = [f"{1000 * statistics.median(calm):.0f} ms", f"{one.median_ratio():.2f}"]
        cells.append(f"{one.ratio('p99'):.2f}")
        for share in ("router", "workers"):
            before, during = (
                statistics.mean(getattr(part, share) for part in parts) for parts in (one.calm, one.attacked)
            )
            cells.append(f"{before:.2f} → {during:.2f}")
        failed = sum(len(part.failures) for part in one.attacked)
        made.add_row(one.name, *cells, str(failed))
    made.caption = (
        f"{len(found[0].calm)} pairs of {STRETCH_SECONDS:.0f} s; shares of a core" if found else None
    )
    return made
