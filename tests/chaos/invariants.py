"""What must be true once no request runs: no blocks held, no slots in doubt, no orphans."""

from __future__ import annotations

import asyncio
import contextlib
import json
from pathlib import Path
from typing import Any

import psutil
import redis

from tests.chaos.target import ROLES, Target, poll
from tests.harness.rank_processes import RANK_MARK
from tests.harness.redis_text import text_client

QUIET_SECONDS = 15.0


async def leaks(target: Target) -> list[str]:
    """Everything that is still wrong after QUIET_SECONDS; empty if all is well."""
    found: list[str] = []

    async def check() -> str:
        found[:] = await look(target)
        return "; ".join(found)

    wrong = await poll(check, QUIET_SECONDS)
    return [wrong] if wrong and not found else found


async def look(target: Target) -> list[str]:
    """Everything that is wrong now. Raises httpx.HTTPError, OSError, ValueError where it can't be seen."""
    return [
        *await _workers(target),
        *await asyncio.to_thread(_reservations, target.redis_url),
        *_processes(target),
    ]


async def _workers(target: Target) -> list[str]:
    state, found = target.state(), []
    views = await target.views()
    for view in views:
        if view["router"]["requests_in_flight"]:
            found.append(f"{view['router']['id']}: {view['router']['requests_in_flight']} streams open")
    expected = {one["id"] for role in ROLES for one in state[role]}
    live = {worker["id"] for worker in views[0]["workers"] if worker["lease"] == "live"}
    statuses = await asyncio.to_thread(_statuses, target.redis_url)
    for worker_id in expected:
        if worker_id not in live or worker_id not in statuses:
            found.append(f"{worker_id}: no status")
        else:
            found += [f"{worker_id}: {wrong}" for wrong in _worker(statuses[worker_id])]
    return found


def _statuses(url: str) -> dict[str, dict[str, Any]]:
    """By worker, as it published them last. Routers read them later, by up to a second. Raises ValueError."""
    with contextlib.closing(text_client(url)) as client:
        try:
            found = [item for key in client.keys("{*}:status") for item in client.hgetall(key).items()]
        except redis.RedisError as error:
            raise ValueError(f"Redis: {error}") from error
    return {str(worker_id): json.loads(status) for worker_id, status in found}


def _worker(status: dict[str, Any]) -> list[str]:
    found = []
    if status["self_check_wrong"]:
        found.append(status["self_check_wrong"])
    if not status["self_checks"]:
        found.append("its integrity has not been checked")
    if status["blocks_held"]:
        found.append(f"{status['blocks_held']} blocks held")
    for name in ("attempts", "handoffs_live", "running", "waiting", "waiting_for_kv"):
        if status[name]:
            found.append(f"{name} = {status[name]}")
    if "ring_slots" in status and status["ring_free"] != status["ring_slots"]:
        in_doubt = status["ring_quarantined"]
        found.append(f"{status['ring_free']} of {status['ring_slots']} slots free, {in_doubt} in doubt")
    return found


def _reservations(url: str) -> list[str]:
    """Load that routers charged, in all and by router: with no request there is none."""
    client = text_client(url)
    try:
        found = []
        for key in client.keys("{*}:load"):
            charged = {field: int(amount) for field, amount in client.hgetall(key).items() if int(amount)}
            if charged:
                found.append(f"charged in Redis, {key!s}: {charged}")
        tables = ((key, client.hlen(key)) for key in client.keys("{*}:chg:*"))
        return found + [f"charged in Redis, {key!s}: {charges} attempts" for key, charges in tables]
    except redis.RedisError as error:
        return [f"Redis: {error}"]
    finally:
        client.close()


def _processes(target: Target) -> list[str]:
    """Orphans: processes of this cluster, found by the directory on their command line, that are not in its state file,
    and ranks, found by their order directory, whose parent is not."""
    state = target.state()
    directory = str(Path(state["logs"]).parent)
    known = {state["pid"], state["redis"]["pid"]}
    known |= {one["pid"] for role in ("router", *ROLES) for one in state[role]} | set(target.pids("process"))
    orphans = []
    for process in psutil.process_iter(["pid", "cmdline"]):
        command = process.info["cmdline"] or []
        if any(directory in part for part in command) and process.info["pid"] not in known:
            orphans.append(f"orphan {process.info['pid']}: {' '.join(command)[:120]}")
        elif RANK_MARK in command and _parent(process, str(target.orders)) not in (None, *known):
            orphans.append(f"orphan rank {process.info['pid']}")
    return orphans


def _parent(process: psutil.Process, orders: str) -> int | None:
    """None if the process has ended or belongs to another cluster."""
    try:
        ours = process.environ().get("BATON_FAULT_ORDERS") == orders
        return process.ppid() if ours and process.status() != psutil.STATUS_ZOMBIE else None
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return None
