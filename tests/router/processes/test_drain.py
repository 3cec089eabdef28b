"""A router of one, two or four processes leaves: no connection is reset, also where one of them is dead or stopped."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import time
from collections import Counter
from pathlib import Path
from typing import cast

import psutil
import pytest
import uvicorn

from cluster.config.router import RouterConfig
from router.http_endpoint import GRACE_SECONDS
from router.processes.http import SharedHttpServer
from router.processes.member import CLOSE_SECONDS, Member, drain_limit_seconds, kill_limit_seconds
from tests.harness.ended import gone
from tests.harness.router_group import HttpStream, RouterGroup, Seen, ask_until_refused, run_group
from tests.harness.waiting import until

USERS = 12
DRAIN = {"drain_delay_seconds": 0.3, "drain_seconds": 1.0}
AT_ONCE = ("bench.probes.token_stubs", "--pairs", "1", "--gap", "0.001")


async def flood(group: RouterGroup) -> tuple[Seen, asyncio.Future[list[None]]]:
    """Clients that have begun, and their end."""
    seen = Seen(Counter())
    users = asyncio.gather(*(ask_until_refused(group, seen) for _ in range(USERS)))
    await until(lambda: seen.answers[200] > 10 * USERS, "all have begun")
    return seen, users


@pytest.mark.long  # in `make test` the next test but one drains a router of two processes under the same load
@pytest.mark.parametrize("processes", [1, 2, 4])
async def test_no_connection_is_reset(processes: int, router_model: Path, tmp_path: Path) -> None:
    with run_group(tmp_path, router_model, processes, AT_ONCE, **DRAIN) as group:
        seen, users = await flood(group)
        os.kill(group.pid, signal.SIGTERM)
        await asyncio.wait_for(users, 60)
    assert (seen.broken, seen.refused) == (0, USERS)
    assert set(seen.answers) <= {200, 503}, seen.answers


@pytest.mark.parametrize("number", [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.long)])
async def test_a_process_that_is_gone_or_stopped_resets_only_what_it_held(
    number: signal.Signals, router_model: Path, tmp_path: Path
) -> None:
    """Each client that the process had accepted loses one connection at most; new ones go to the others."""
    with run_group(tmp_path, router_model, 2, AT_ONCE, **DRAIN) as group:
        seen, users = await flood(group)
        pid = group.pids()[0]
        os.kill(pid, signal.SIGSTOP)
        held = await asyncio.to_thread(_accepted, pid, group.address[1])
        os.kill(pid, number)
        os.kill(group.pid, signal.SIGTERM)
        await asyncio.wait_for(users, 60)
    assert seen.refused == USERS
    assert seen.broken <= held < USERS, (seen, held)


def _accepted(pid: int, port: int) -> int:
    found = psutil.Process(pid).net_connections("tcp")
    return sum(one.laddr.port == port and one.status != psutil.CONN_LISTEN for one in found)


@pytest.mark.parametrize("count", [1, pytest.param(2, marks=pytest.mark.long)])
async def test_a_signal_to_processes_alone_ends_nothing(
    count: int, router_model: Path, tmp_path: Path
) -> None:
    """As `kill` and supervisors send it; the port answers meanwhile and until the parent gets it."""
    with run_group(tmp_path, router_model, 2, AT_ONCE, **DRAIN) as group:
        seen, users = await flood(group)
        pids = group.pids()
        for pid in pids[:count]:
            os.kill(pid, signal.SIGTERM)
        await until(lambda: group.log.count("SIGTERM to one process") == count, "it is noticed")
        # Longer than a drain takes
        for _ in range(20):
            answered = seen.answers[200]
            await until(lambda before=answered: seen.answers[200] > before, "the port answers")
            await asyncio.sleep(0.1)
        assert set(seen.answers) == {200} and group.pids() == pids
        os.kill(group.pid, signal.SIGTERM)
        await asyncio.wait_for(users, 60)
    assert (seen.broken, seen.refused) == (0, USERS)
    assert set(seen.answers) <= {200, 503}, seen.answers


async def test_a_drained_process_leaves_the_port_to_the_others() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        config = uvicorn.Config("none:app")
        await SharedHttpServer(config, cast(Member, None), 1.0, 8).accept_last([listener])
        socket.create_connection(listener.getsockname(), timeout=10).close()


async def test_streams_are_finished_before_the_router_leaves(router_model: Path, tmp_path: Path) -> None:
    with run_group(tmp_path, router_model, 2, drain_seconds=30.0) as group:
        opened = [await HttpStream.open(group, tokens=15) for _ in range(6)]
        os.kill(group.pid, signal.SIGTERM)
        for one in opened:
            assert b"[DONE]" in await one.rest()
            await one.close()


@pytest.mark.long  # it outlasts the grace behind a drain
async def test_a_request_on_an_open_connection_is_finished_though_its_process_has_drained(
    router_model: Path, tmp_path: Path
) -> None:
    """The other process drained for longer, and both then closed: the request was cut after GRACE_SECONDS."""
    with run_group(tmp_path, router_model, 2, drain_seconds=60.0) as group, contextlib.ExitStack() as opened:
        by_process: dict[int, OpenConnection] = {}
        while len(by_process) < 2:
            one = await OpenConnection.open(group)
            opened.callback(one.close)
            by_process.setdefault(await one.process(), one)
        busy, idle = by_process[0], by_process[1]
        first = await busy.stream(tokens=60)  # beyond the start of the other one, on a busy machine too
        os.kill(group.pid, signal.SIGTERM)
        await asyncio.sleep(1.5)  # it is quiet, and has drained
        last = await idle.stream(tokens=10 * int(2 * GRACE_SECONDS + 2))
        assert b"[DONE]" in await first.rest()
        await asyncio.wait_for(ask_until_refused(group, Seen(Counter())), 2 * GRACE_SECONDS)
        assert b"[DONE]" in await last.rest()


class OpenConnection:
    """It has had a request before."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter):
        self._reader, self._writer = reader, writer

    @classmethod
    async def open(cls, group: RouterGroup) -> OpenConnection:
        return cls(*await asyncio.open_connection(*group.address))

    async def process(self) -> int:
        """The index of the process that serves it."""
        self._writer.write(b"GET /v1/cluster HTTP/1.1\r\nhost: x\r\n\r\n")
        head = await self._reader.readuntil(b"\r\n\r\n")
        size = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
        return int(json.loads(await self._reader.readexactly(size))["router"]["process"])

    async def stream(self, tokens: int) -> HttpStream:
        return await HttpStream.begin(self._reader, self._writer, tokens)

    def close(self) -> None:
        self._writer.transport.abort()


@pytest.mark.long
async def test_a_process_that_closes_late_is_not_killed(router_model: Path, tmp_path: Path) -> None:
    """A stream that outlives the drain limit and the grace after it."""
    with run_group(tmp_path, router_model, 2, drain_seconds=0.5) as group:
        stream = await HttpStream.open(group)
        began = time.monotonic()
        os.kill(group.pid, signal.SIGTERM)
        await asyncio.wait_for(stream.rest(), 60)
        await stream.close()
        assert time.monotonic() - began > GRACE_SECONDS, "the stream had its grace"
        await until(lambda: gone(group.pid), "it has left")
        assert "is killed" not in group.log
        # uvicorn logs that it cancelled the stream
        (group.directory / "router.log").write_text("")


def test_the_parent_waits_longer_than_a_process_takes() -> None:
    config = RouterConfig(model=Path("m"), drain_seconds=3, drain_delay_seconds=2)
    assert drain_limit_seconds(config) > 5
    assert kill_limit_seconds(config) - drain_limit_seconds(config) == CLOSE_SECONDS > 4 * GRACE_SECONDS
