"""A router of two processes, live: one router to its clients, whichever process ends or stops."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import json
import os
import signal
import socket
from collections.abc import AsyncIterator, Iterator, Mapping
from pathlib import Path
from typing import Any

import psutil
import pytest

from baton.client import AsyncClient, Client
from cluster.config.router import RouterConfig
from cluster.errors import ConfigError
from router.listening import listen_http, refuse_connections, reserve_grpc
from tests.harness import router_process
from tests.harness.router import KeyFile
from tests.harness.router_group import HttpStream, RouterGroup, answered, run_group
from tests.harness.waiting import until, wait_for

STREAMS = 12
RESTART_SECONDS = 60.0
PIDFD_GETFD = 438  # the system call's number, the same on every processor


@pytest.fixture
def group(router_model: Path, tmp_path: Path) -> Iterator[RouterGroup]:
    with run_group(tmp_path, router_model, 2, metrics_port=0) as running:
        yield running


@pytest.fixture(scope="module")
def shared_group(router_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RouterGroup]:
    """For tests that leave it as they found it: both processes serve, without requests."""
    with run_group(tmp_path_factory.mktemp("group"), router_model, 2, metrics_port=0) as running:
        yield running


@contextlib.asynccontextmanager
async def streams(
    group: RouterGroup, count: int, headers: Mapping[str, str] | None = None
) -> AsyncIterator[list[HttpStream]]:
    opened: list[HttpStream] = []
    try:
        for _ in range(count):
            opened.append(await HttpStream.open(group, headers=headers))
        yield opened
    finally:
        for one in opened:
            await one.close()


async def in_flight(group: RouterGroup) -> int:
    view = await asyncio.to_thread(group.view)
    return int(view["requests_in_flight"])


async def connections(pid: int) -> int:
    return len(await asyncio.to_thread(psutil.Process(pid).net_connections, "tcp"))


async def test_connections_spread_over_the_processes(shared_group: RouterGroup) -> None:
    group = shared_group
    before = [await connections(pid) for pid in group.pids()]
    async with streams(group, STREAMS):
        now = [await connections(pid) for pid in group.pids()]
        taken = [later - earlier for earlier, later in zip(before, now, strict=True)]
        assert min(taken) >= STREAMS // 3, taken
        assert await in_flight(group) == STREAMS
    await asyncio.to_thread(wait_for, lambda: group.view()["requests_in_flight"] == 0, 30.0, "all have ended")


async def test_a_tenants_limit_holds_over_the_processes(router_model: Path, tmp_path: Path) -> None:
    keys = KeyFile(tmp_path / "keys.yaml")
    key = keys.add("a", max_concurrent_requests=4)
    own = {"authorization": f"Bearer {key}"}
    with run_group(tmp_path / "router", router_model, 2, api_keys_file=str(keys.path)) as group:
        async with streams(group, 4, own) as opened:
            assert [one.status for one in opened] == [200] * 4
            for _ in range(6):
                refused = await HttpStream.open(group, headers=own)
                assert refused.status == 429
                await refused.close()


@pytest.mark.long
async def test_connections_are_limited_over_the_processes(router_model: Path, tmp_path: Path) -> None:
    with run_group(tmp_path, router_model, 2, max_http_connections=6) as group:
        async with streams(group, 6) as opened:
            assert [one.status for one in opened] == [200] * 6
            seventh = await HttpStream.open(group)
            assert seventh.status == 429
            await seventh.close()


async def test_a_killed_process_gives_back_its_places_and_is_replaced(shared_group: RouterGroup) -> None:
    group = shared_group
    killed, restarts = group.pids()[0], ("baton_process_restarts_total", ())
    before = group.samples()[restarts]
    async with streams(group, STREAMS) as opened:
        group.signal(0, signal.SIGKILL)
        ended = [asyncio.create_task(one.rest()) for one in opened]
        await until(lambda: any(one.done() for one in ended), "the killed process's streams have ended")
        await until(lambda: group.pids()[0] not in (0, killed), "it is replaced", RESTART_SECONDS)
        going_on = [one for one in ended if not one.done()]
        assert 0 < len(going_on) < STREAMS, "the other process's streams go on"
        assert await in_flight(group) == len(going_on)
        for one in ended:
            one.cancel()
        await asyncio.gather(*ended, return_exceptions=True)
    group.wait_ready("both processes serve")
    assert group.samples()[restarts] == before + 1
    await asyncio.to_thread(wait_for, lambda: group.view()["requests_in_flight"] == 0, 30.0, "all have ended")


@pytest.mark.long
def test_a_port_that_an_ended_process_closed_is_open_again(group: RouterGroup) -> None:
    """Whatever has set the filter of a drain on the sockets that all processes share."""
    listeners = _listeners_of(group)
    refuse_connections(listeners)
    for listener in listeners:
        listener.close()
    killed = group.signal(0, signal.SIGKILL)
    wait_for(lambda: group.pids()[0] not in (0, killed), RESTART_SECONDS, "it is replaced")
    assert group.get("/v1/models")[0] == 200


def _listeners_of(group: RouterGroup) -> list[socket.socket]:
    """The parent's HTTP listeners; copies of their descriptors, so the same sockets."""
    libc = ctypes.CDLL(None, use_errno=True)
    pidfd = os.pidfd_open(group.pid)
    found = []
    try:
        for fd in map(int, os.listdir(f"/proc/{group.pid}/fd")):
            copy = libc.syscall(PIDFD_GETFD, pidfd, fd, 0)
            if copy >= 0 and (one := _listening(copy, group.address)):
                found.append(one)
    finally:
        os.close(pidfd)
    if not found:
        pytest.skip("descriptors of other processes cannot be copied here")
    return found


def _listening(fd: int, address: tuple[str, int]) -> socket.socket | None:
    with contextlib.ExitStack() as closing:
        closing.callback(os.close, fd)
        with contextlib.suppress(OSError):  # no socket, or none of the Internet
            one = socket.socket(fileno=os.dup(fd))
            if one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN) and one.getsockname() == address:
                return one
            one.close()
    return None


@pytest.mark.long
async def test_clients_of_one_address_lose_no_token_to_a_killed_process(group: RouterGroup) -> None:
    """Both processes in turn, each while half of the streams run through it."""
    tokens = 60

    async def use(number: int) -> list[int]:
        # A channel is one connection, and connections spread over the processes.
        async with AsyncClient(group.grpc, max_reconnects=8) as client:
            stream = client.stream(f"prompt {number}", max_tokens=tokens, ignore_eos=True, temperature=0)
            return [token async for chunk in stream for token in chunk.token_ids]

    users = [asyncio.create_task(use(number)) for number in range(STREAMS)]
    for index in (0, 1):
        before = group.pids()[index]
        await until(lambda: group.view()["requests_in_flight"] == STREAMS, "all streams run")
        group.signal(index, signal.SIGKILL)
        await until(
            lambda i=index, b=before: group.pids()[i] not in (0, b), "it is replaced", RESTART_SECONDS
        )
    assert [len(one) for one in await asyncio.gather(*users)] == [tokens] * STREAMS


@pytest.mark.long
def test_a_stopped_process_is_named_and_nothing_else_waits_for_it(group: RouterGroup) -> None:
    before = group.samples()
    group.signal(0, signal.SIGSTOP)
    try:
        wait_for(lambda: group.get("/ready")[0] == 503, 20, "not ready")
        (why,) = group.why_not_ready()
        assert why.startswith("process 0: it has been silent for "), why
        for _ in range(10):
            assert group.get("/v1/models")[0] == 200
        shown = group.samples()
        assert shown["baton_processes", ()] == 1
        assert answered(shown) >= answered(before)
    finally:
        group.signal(0, signal.SIGCONT)
    group.wait_ready("it goes on")
    assert group.pids()[0] and group.samples()["baton_processes", ()] == 2


@pytest.mark.long
def test_the_processes_end_with_their_parent(group: RouterGroup) -> None:
    processes = [psutil.Process(pid) for pid in group.pids()]
    os.kill(group.pid, signal.SIGKILL)
    _, alive = psutil.wait_procs(processes, timeout=30)
    assert not alive, alive


@pytest.mark.long
async def test_the_ports_are_free_soon_after_the_parents_end(router_model: Path, tmp_path: Path) -> None:
    """For the router that a supervisor starts; streams that are open are finished."""
    with run_group(tmp_path, router_model, 2, drain_seconds=60.0) as group:
        short = await HttpStream.open(group, tokens=30)
        async with streams(group, 4) as opened:
            ended = [asyncio.create_task(one.rest()) for one in opened]
            os.kill(group.pid, signal.SIGKILL)
            config = RouterConfig(
                model=router_model,
                http_port=group.address[1],
                grpc_port=int(group.grpc.rpartition(":")[2]),
            )
            await until(lambda: _free(config), "the ports are free", 30)
            assert not any(one.done() for one in ended), "long streams go on"
            assert b"[DONE]" in await short.rest()
            for one in ended:
                one.cancel()
            await asyncio.gather(*ended, return_exceptions=True)
        await short.close()


def _free(config: RouterConfig) -> bool:
    with contextlib.suppress(ConfigError), contextlib.ExitStack() as stack:
        for listener in listen_http(config):  # before the other port, which may still be taken
            stack.enter_context(listener)
        stack.enter_context(reserve_grpc(config))
        return True
    return False


@pytest.mark.long
async def test_a_port_that_is_taken_is_named(group: RouterGroup, tmp_path: Path) -> None:
    """Also the gRPC port, which a second router of the same user could share."""
    for name, port in {
        "http_port": group.address[1],
        "grpc_port": int(group.grpc.rpartition(":")[2]),
    }.items():
        settings: dict[str, Any] = {
            "model": json.loads((group.directory / "router.json").read_text())["model"],
            "redis_url": "redis://127.0.0.1:1",
            "processes": 2,
            name: port,
        }
        with (
            pytest.raises(RuntimeError, match=f"--{name.replace('_', '-')} {port}"),
            router_process.run_router(tmp_path / "second", settings),
        ):
            pass


@pytest.mark.long
def test_a_process_that_does_not_start_ends_the_router_with_its_reason(tmp_path: Path) -> None:
    settings = {"model": str(tmp_path), "redis_url": "redis://127.0.0.1:1", "processes": 2}
    with (
        pytest.raises(RuntimeError, match=r"process [01] of this router ended with code 1 before it served"),
        router_process.run_router(tmp_path / "router", settings),
    ):
        pass


@pytest.mark.parametrize(
    "host", ["::1", *(pytest.param(host, marks=pytest.mark.long) for host in ("0.0.0.0", "::"))]
)
def test_a_router_listens_on_the_address_that_it_is_given(
    host: str, router_model: Path, tmp_path: Path
) -> None:
    shown = f"[{host}]" if ":" in host else host
    with run_group(tmp_path, router_model, 2, host=host) as group:
        assert group.http.startswith(f"http://{shown}:") and group.grpc.startswith(f"{shown}:")
        assert group.get("/v1/models")[0] == 200
        with Client(group.grpc) as client:
            assert client.models()
