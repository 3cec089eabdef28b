"""Pairs of a calm and an attacked stretch of the same minute: their ratio says more than either on a machine with other
work."""

from __future__ import annotations

import asyncio
import json
import ssl
import statistics
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from baton.client import ClientTls
from tests.harness.cluster import Cluster
from tests.security.attacks.attackers import BEGUN
from tests.security.attacks.tenant import p99, tenant

STEP_SECONDS = 0.2
BEGIN_SECONDS = 90.0  # at most, of attackers at the lowest priority on a busy machine
TOLD_SECONDS = 15.0  # between two lines about attackers that have not begun
REST_SECONDS = 1.5  # after an attack, for what is still queued


@dataclass
class Stretch:
    """What one kind of stretches had, all pairs together."""

    firsts: list[float] = field(default_factory=list)  # seconds to the first token
    failures: list[str] = field(default_factory=list)
    router: list[float] = field(default_factory=list)  # shares of a core, by step
    workers: list[float] = field(default_factory=list)
    attackers: list[float] = field(default_factory=list)


@dataclass
class Pairs:
    name: str
    calm: Stretch = field(default_factory=Stretch)
    attacked: Stretch = field(default_factory=Stretch)
    memory: int = 0  # bytes of the router, at most
    answers: Counter[str] = field(default_factory=Counter)  # to the attackers

    def ratio(self, of: Callable[[list[float]], float] = p99) -> float:
        return of(self.attacked.firsts) / of(self.calm.firsts)

    @property
    def failures(self) -> list[str]:
        return self.calm.failures + self.attacked.failures


class PairRunner:
    def __init__(self, cluster: Cluster, keys: Sequence[str], certs: Path | None = None):
        """`keys`: the tenant's, and two of attackers. `certs`: of mutual TLS."""
        self._cluster, (self._key, *self._attackers) = cluster, keys
        self._certs = certs
        tls = ClientTls(certs / "ca.pem", certs / "client.pem", certs / "client.key") if certs else None
        # Without TLS too: httpx reads all certificates of the system for a client that is given none
        self._verify = tls.context() if tls else ssl.create_default_context()
        self._router = [psutil.Process(pid) for pid in cluster.router_pids]
        self._workers = [psutil.Process(pid) for pid in cluster.worker_pids]

    async def tenant(self, seconds: float) -> Stretch:
        """Its requests alone, unmeasured but for themselves."""
        return Stretch(*await tenant(self._cluster.http, self._key, self._verify, seconds))

    async def run(self, name: str, attacks: Sequence[str], pairs: int, seconds: float) -> Pairs:
        found = Pairs(name)
        for number in range(1, pairs + 1):
            print(f"  {name}: pair {number} of {pairs}", flush=True)
            await self._stretch(found, found.calm, seconds)
            command = ["-m", "tests.security.attacks.attackers", "--http", self._cluster.http]
            command += ["--grpc", self._cluster.grpc, "--keys", *self._attackers]
            command += ["--seconds", str(seconds + 1)]
            command += ["--certs", str(self._certs)] if self._certs else []
            command += ["--only", *attacks]
            attackers = await asyncio.create_subprocess_exec(
                sys.executable, *command, stdout=asyncio.subprocess.PIPE
            )
            try:
                assert attackers.stdout is not None
                assert await _first_line(attackers.stdout) == BEGUN, "the attackers ended"
                await self._stretch(found, found.attacked, seconds, attackers.pid)
                said, _ = await asyncio.wait_for(attackers.communicate(), 60)
            finally:
                if attackers.returncode is None:
                    attackers.kill()
                    await attackers.wait()
            found.answers.update(json.loads(said or "{}"))
            await asyncio.sleep(REST_SECONDS)
        return found

    async def _stretch(self, found: Pairs, kind: Stretch, seconds: float, attackers: int = 0) -> None:
        groups = [(kind.router, self._router), (kind.workers, self._workers)]
        if attackers:
            groups.append((kind.attackers, [psutil.Process(attackers)]))
        running = asyncio.create_task(tenant(self._cluster.http, self._key, self._verify, seconds))
        last = [_computed(processes) for _, processes in groups]
        while not running.done():
            await asyncio.sleep(STEP_SECONDS)
            found.memory = max(found.memory, *(one.memory_info().rss for one in self._router))
            now = [_computed(processes) for _, processes in groups]
            for (shares, _), before, after in zip(groups, last, now, strict=True):
                shares.append((after - before) / STEP_SECONDS)
            last = now
        firsts, failures = running.result()
        kind.firsts += firsts
        kind.failures += failures


async def _first_line(output: asyncio.StreamReader) -> str:
    """Tells of the wait for it. Raises TimeoutError."""
    reading = asyncio.ensure_future(output.readline())
    try:
        async with asyncio.timeout(BEGIN_SECONDS):
            while not (await asyncio.wait([reading], timeout=TOLD_SECONDS))[0]:
                print("    the attackers have not begun yet", flush=True)
        return (await reading).decode().strip()
    finally:
        reading.cancel()


def mean(shares: Sequence[float]) -> float:
    return statistics.mean(shares) if shares else 0.0


def _computed(processes: Sequence[psutil.Process]) -> float:
    """Seconds of processor time."""
    found = 0.0
    for one in processes:
        try:
            times = one.cpu_times()
        except psutil.NoSuchProcess:  # the tenant's last requests take longer than the attacks
            continue
        found += float(times.user + times.system)
    return found
