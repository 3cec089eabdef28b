"""Services with an address of their own: connections to it go on to one of the ready pods."""

from __future__ import annotations

import asyncio
import contextlib
import random
import threading
from types import TracebackType
from typing import Self

from tests.kubernetes.api.kinds import Object
from tests.kubernetes.controllers.base import Client
from tests.kubernetes.kubelet.network import Network

CONNECT_SECONDS = 5.0
CHUNK_BYTES = 64 << 10
STOP_SECONDS = 10.0


class ServiceProxy:
    """Looks after listening sockets, one for each port of each Service; runs on a loop in a thread of its own."""

    def __init__(self, client: Client, network: Network):
        self._client = client
        self._network = network
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="services", daemon=True)
        self._connections: set[asyncio.Task[None]] = set()
        self._served: dict[str, tuple[str, list[asyncio.Server]]] = {}

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for uid in list(self._served):
            self._drop(uid)
        asyncio.run_coroutine_threadsafe(_cancel_others(), self._loop).result(STOP_SECONDS)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(STOP_SECONDS)
        self._loop.close()

    def step(self) -> None:
        """Called whenever something has changed."""
        wanted = {}
        for service in self._client.all("Service"):
            if service["spec"].get("clusterIP") not in (None, "", "None"):
                wanted[service["metadata"]["uid"]] = service
        for uid in self._served.keys() - wanted.keys():
            self._drop(uid)
        for uid in wanted.keys() - self._served.keys():
            self._add(wanted[uid])

    def _add(self, service: Object) -> None:
        address = service["spec"]["clusterIP"]
        self._network.add_address(address)
        servers = []
        for port in service["spec"]["ports"]:
            starting = self._listen(service, address, port)
            servers.append(asyncio.run_coroutine_threadsafe(starting, self._loop).result(STOP_SECONDS))
        self._served[service["metadata"]["uid"]] = (address, servers)

    def _drop(self, uid: str) -> None:
        address, servers = self._served.pop(uid)
        for server in servers:
            self._loop.call_soon_threadsafe(server.close)
        self._network.drop_address(address)

    async def _listen(self, service: Object, address: str, port: Object) -> asyncio.Server:
        meta = service["metadata"]

        async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            # The loop keeps its tasks by weak references only.
            task = asyncio.current_task()
            assert task is not None
            self._connections.add(task)
            try:
                with contextlib.suppress(OSError):
                    await self._forward(meta["namespace"], meta["name"], port.get("name", ""), reader, writer)
            finally:
                writer.close()
                self._connections.discard(task)

        return await asyncio.start_server(handle, address, port["port"])

    async def _forward(
        self, namespace: str, name: str, port: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        targets = self._targets(namespace, name, port)
        random.shuffle(targets)
        for target in targets:
            try:
                opening = asyncio.open_connection(*target)
                far_reader, far_writer = await asyncio.wait_for(opening, CONNECT_SECONDS)
            except (OSError, TimeoutError):
                continue
            try:
                await asyncio.gather(
                    _pump(reader, far_writer), _pump(far_reader, writer), return_exceptions=True
                )
            finally:
                far_writer.close()
            return

    def _targets(self, namespace: str, name: str, port: str) -> list[tuple[str, int]]:
        endpoints = self._client.find("Endpoints", namespace, name) or {}
        return [
            (address["ip"], one["port"])
            for subset in endpoints.get("subsets") or ()
            for address in subset.get("addresses") or ()
            for one in subset.get("ports") or ()
            if one.get("name", "") == port
        ]


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while data := await reader.read(CHUNK_BYTES):
            writer.write(data)
            await writer.drain()
    finally:
        with contextlib.suppress(OSError, RuntimeError):
            writer.write_eof()


async def _cancel_others() -> None:
    mine = asyncio.current_task()
    others = [task for task in asyncio.all_tasks() if task is not mine]
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)
    await asyncio.sleep(0)  # transports close in the next turn
