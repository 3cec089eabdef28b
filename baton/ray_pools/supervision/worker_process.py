"""A worker process that outlives its supervisor.

Runs as `python -m baton.ray_pools.supervision.worker_process SOCKET`, with its settings (JSON) on standard input.
It listens first, and the command returns then. Messages to its supervisor, one line of JSON each:
    {"worker": …, "healthy": …, "status": {…}}    twice a second
    {"failed": "…"}                               it could not start
    {"left": "exit" | "stay"}                     it has drained, and the reason
The supervisor sends `keep` once, `head HOST:PORT` (Ray's, which the worker then watches), and `stop` to end the worker.
Without a supervisor the worker waits for the next one,
then leaves.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from baton.processes import sessions
from baton.processes.force_exit import end_surely
from baton.ray_pools.supervision.worker_sockets import WorkerFiles, owner_gone
from cluster.process import grpc_log
from cluster.protocol.times import WORKER_REPORT_SECONDS

if TYPE_CHECKING:
    from cluster.config.worker import WorkerConfig
    from worker.worker import Worker

log = logging.getLogger(__name__)
# Ray and Serve restart within half a minute on two idle cores; a busy machine takes longer.
UNSUPERVISED_SECONDS = 120.0
UNREAD_BYTES = 64 << 10
OWNED_SECONDS = 600.0  # if the cluster's owner lives, which will end it


def main(path: Path) -> None:
    values = json.load(sys.stdin)
    listening = socket.socket(socket.AF_UNIX)
    listening.bind(str(path))
    listening.listen()
    sessions.detach(listening.listen)  # again in the child: SO_PEERCRED names the process that called listen
    grpc_log.silence()
    import uvloop

    from cluster.config import sources
    from cluster.config.worker import WorkerConfig
    from cluster.telemetry import logs

    # Settings that differ between nodes (address, files of secrets) are in the node's environment.
    config = sources.load(WorkerConfig, {}, values=values)
    logs.configure(config.worker_id)
    uvloop.run(_until_it_ends(config, path, listening))


class SupervisorEndpoint:
    """The socket for the supervisor."""

    def __init__(self, directory: Path) -> None:
        self.stop_wanted = asyncio.Event()
        self.ray_head = ""  # host:port of the last supervisor's Ray
        self._directory = directory
        self._supervisors: set[asyncio.StreamWriter] = set()
        self._unsupervised_since = time.monotonic()

    async def accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            if await reader.readline() == b"keep\n":
                self._supervisors.add(writer)
                while line := await reader.readline():
                    if line == b"stop\n":
                        self.stop_wanted.set()
                    elif line.startswith(b"head "):
                        self.ray_head = line.removeprefix(b"head ").strip().decode(errors="replace")
        self._supervisors.discard(writer)
        self._unsupervised_since = time.monotonic()
        writer.close()

    def send(self, message: Mapping[str, Any]) -> None:
        line = json.dumps(message).encode() + b"\n"
        for writer in self._supervisors:
            if writer.transport.get_write_buffer_size() < UNREAD_BYTES:  # a stopped supervisor does not read
                writer.write(line)

    async def disconnect(self) -> None:
        """Wait until all messages have been written, then disconnect."""
        for writer in list(self._supervisors):
            with contextlib.suppress(OSError):
                await writer.drain()
                writer.close()
                await writer.wait_closed()

    def abandoned(self) -> bool:
        if self._supervisors:
            return False
        if (gone := owner_gone(self._directory)) is not None:
            return gone or time.monotonic() - self._unsupervised_since > OWNED_SECONDS
        return time.monotonic() - self._unsupervised_since > UNSUPERVISED_SECONDS


async def _until_it_ends(config: WorkerConfig, path: Path, listening: socket.socket) -> None:
    try:
        await _run(config, path, listening)
    finally:
        end_surely()


async def _run(config: WorkerConfig, path: Path, listening: socket.socket) -> None:
    from baton.workers import start_worker
    from cluster.config import sources

    # The event loop is blocked while a model is loaded, and nothing is lost by ending at once.
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    endpoint = SupervisorEndpoint(path.parent)
    server = await asyncio.start_unix_server(endpoint.accept, sock=listening)
    try:
        sources.require_secret(config)
        worker = await start_worker(config)
    except Exception as error:
        await asyncio.sleep(WORKER_REPORT_SECONDS)  # the supervisor connected while the loop was blocked
        endpoint.send({"failed": f"{type(error).__name__}: {error}"})
        await endpoint.disconnect()
        raise
    WorkerFiles(path.with_suffix("")).write_facts(worker.worker_id)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, endpoint.stop_wanted.set)
    then = await _serve(worker, endpoint)
    log.info("%s is leaving", worker.worker_id)
    await worker.stop()
    if then is not None:
        endpoint.send({"left": then})
    await endpoint.disconnect()
    server.close()
    WorkerFiles(path.with_suffix("")).clear()


async def _serve(worker: Worker, endpoint: SupervisorEndpoint) -> str | None:
    """Serve until the supervisor stops the worker or is gone for too long, or `baton drain` names it; returns what follows
    that drain. Raises if the worker fails."""
    drained = asyncio.create_task(worker.wait_drain_wanted())
    failed = asyncio.create_task(worker.wait_failed())
    stop = asyncio.create_task(endpoint.stop_wanted.wait())
    ends: set[asyncio.Task[Any]] = {drained, failed, stop}
    while not any(task.done() for task in ends) and not endpoint.abandoned():
        if endpoint.ray_head:
            worker.watch_ray_head(endpoint.ray_head)
        endpoint.send(
            {"worker": worker.worker_id, "healthy": worker.healthy(), "status": worker.status().encode()}
        )
        await asyncio.wait(ends, timeout=WORKER_REPORT_SECONDS, return_when=asyncio.FIRST_COMPLETED)
    if failed.done():
        endpoint.send({"failed": repr(failed.result())})
    for task in ends:
        task.cancel()
    return drained.result() if drained.done() and not drained.cancelled() else None


if __name__ == "__main__":
    main(Path(sys.argv[1]))
