"""The cluster under test, as its state file and its routers describe it at present."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil
import redis

from tests.harness.rank_processes import rank_pids
from tests.harness.redis_text import text_client

ROLES = ("prefill", "decode")
WHOLE_SECONDS = 120.0  # two ranks starting on two cores beside running streams take most of a minute


@dataclass(frozen=True)
class Target:
    state_file: Path
    replicas: int  # of each of routers, prefill and decode workers
    orders: Path  # directory from which its processes take fault orders
    ranks: Mapping[str, int]  # of a worker, by role
    processes: int = 1  # of a router

    def state(self) -> dict[str, Any]:
        state: dict[str, Any] = json.loads(self.state_file.read_text())
        return state

    @property
    def logs(self) -> Path:
        return Path(self.state()["logs"])

    @property
    def grpc(self) -> list[str]:
        return [router["grpc"] for router in self.state()["router"]]

    @property
    def http(self) -> list[str]:
        return [router["http"] for router in self.state()["router"]]

    @property
    def redis_url(self) -> str:
        return str(self.state()["redis"]["url"])

    def pids(self, role: str) -> list[int]:
        """`role`: router, process, prefill, decode or redis."""
        state = self.state()
        if role == "redis":
            return [state["redis"]["pid"]]
        if role == "process":
            return [pid for router in state["router"] for pid in router["processes"]]
        return [one["pid"] for one in state[role]]

    def pid_of(self, worker_id: str) -> int | None:
        state = self.state()
        return next((one["pid"] for role in ROLES for one in state[role] if one["id"] == worker_id), None)

    def workers(self, state: dict[str, Any], role: str) -> set[str]:
        return {one["id"] for one in state[role]}

    def link_addresses(self) -> dict[str, str]:
        """By worker, as registered."""
        with contextlib.closing(text_client(self.redis_url)) as client:
            (members,) = client.keys("{*}:members")
            registered = client.hgetall(members)
        return {str(name): json.loads(facts)["link_address"] for name, facts in registered.items()}

    async def views(self) -> list[dict[str, Any]]:
        """Every router's /v1/cluster. Raises httpx.HTTPError."""
        async with httpx.AsyncClient(timeout=3.0) as client:
            answers = [await client.get(f"{url}/v1/cluster") for url in self.http]
        return [answer.json() for answer in answers]

    async def total(self, field: str) -> int:
        """The sum of a field of all live workers' statuses; counts of a worker that died are not in it."""
        view = (await self.views())[0]
        return sum(int(one["status"].get(field, 0)) for one in view["workers"] if one["lease"] == "live")

    async def whole(self, seconds: float = WHOLE_SECONDS) -> str:
        """Waits until every router sees every worker alive. Returns what is missing, or ""."""
        return await poll(self._missing, seconds)

    async def placement_back(self, seconds: float = WHOLE_SECONDS) -> float:
        """From the moment at which Redis answers again until every router places by it, and sees every worker."""
        loop = asyncio.get_running_loop()
        silent = await poll(lambda: asyncio.to_thread(self._redis_silent), seconds, 0.02)
        answers = loop.time()
        missing = silent or await poll(self._missing, seconds, 0.05)
        return seconds if missing else loop.time() - answers

    def _redis_silent(self) -> str:
        with contextlib.closing(text_client(self.redis_url, 0.2)) as client:
            try:
                client.ping()
            except redis.RedisError as error:
                return f"Redis: {error}"
        return ""

    async def _missing(self) -> str:
        state = self.state()
        if len(state["router"]) < self.replicas:
            return "a router is missing"
        if not all(psutil.pid_exists(one["pid"]) for role in ("router", *ROLES) for one in state[role]):
            return "a process has exited"
        if self.processes > 1 and not all(map(psutil.pid_exists, self.pids("process"))):
            return "a process of a router has exited"
        expected = self.workers(state, "prefill") | self.workers(state, "decode")
        if len(expected) < 2 * self.replicas:
            return f"{2 * self.replicas - len(expected)} workers are missing"
        for one, ranks in ((one, self.ranks[role]) for role in ROLES for one in state[role]):
            if len(rank_pids(one["pid"])) != ranks - 1:  # a worker ends with any of its ranks
                return f"a rank of {one['id']} is missing"
        for view in await self.views():
            live = {worker["id"] for worker in view["workers"] if worker["lease"] == "live"}
            if not view["redis"]["ok"]:
                return "a router has no Redis"
            if not expected <= live:
                return f"a router does not see {sorted(expected - live)}"
        return ""


async def poll(check: Any, seconds: float, pause_seconds: float = 0.1) -> str:
    """Call `check` until it returns "", for `seconds` at most. Returns its last answer: what is wrong, or ""."""
    deadline = asyncio.get_running_loop().time() + seconds
    while True:
        try:
            wrong: str = await check()
        except (httpx.HTTPError, OSError, ValueError) as error:
            wrong = f"{type(error).__name__}: {error}"
        if not wrong or asyncio.get_running_loop().time() > deadline:
            return wrong
        await asyncio.sleep(pause_seconds)
