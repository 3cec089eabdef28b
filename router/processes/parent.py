"""The parent of a router's processes: it has the ports, starts and restarts the processes, and merges their metrics.

    start ─► all processes serve ─► (one ends: its counts are reclaimed, and it is started again) ─► close
    close:  all drain ─► each has drained ─► the HTTP port takes no connection more ─► each ends ─► the port closes

It reads no request, so nothing that clients send can end it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import time
from collections.abc import Callable

from cluster import addresses
from cluster.config.router import RouterConfig
from cluster.errors import SetupError
from cluster.periodic import Periodic
from cluster.process.restarts import Restarts
from cluster.protocol.times import LOOP_STALL_SECONDS, SUSPECT_SECONDS
from cluster.telemetry.metrics import router as declared
from cluster.telemetry.registry import Registry
from router.admission.admission import most_holders
from router.listening import allow_connections, listen_http, refuse_connections, reserve_grpc
from router.processes.child_process import ChildProcess
from router.processes.member import drain_limit_seconds, kill_limit_seconds, process_config
from router.processes.memory import SharedMemory
from router.processes.merged_metrics import MergedMetrics
from router.processes.metrics_port import MetricsPort
from router.processes.readiness import why_not_ready

log = logging.getLogger(__name__)
START_SECONDS = 300.0  # for a process to serve
WATCH_SECONDS = 1.0
LATE_SECONDS = 1.0  # a watch that is later: this process was stopped, and perhaps the others with it
SNAPSHOT_SECONDS = 5.0  # what a process counts in this time may be missing after its death


class RouterProcesses:
    """`start`, then serve until `close`."""

    def __init__(self, config: RouterConfig, changed: Callable[[], None] = lambda: None):
        """`changed` is called when a process has started to serve. Raises ConfigError where a port is not free."""
        self._config = config
        self._changed = changed
        self._http = listen_http(config)
        self._http_port = self._http[0].getsockname()[1]
        self._grpc = reserve_grpc(config)
        self._memory = SharedMemory.create(config.processes, most_holders(config))
        registry = Registry(aliases="none")
        self._restarts = declared.PROCESS_RESTARTS.create(registry)
        self.metrics = MergedMetrics(registry)
        self._children: dict[int, ChildProcess] = {}
        self._draining = asyncio.Event()
        self.failed: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._tasks: list[asyncio.Task[None]] = []
        self._watch = Watch(self._memory, self._children)
        self._snapshots = Periodic("reading the processes' metrics", SNAPSHOT_SECONDS, self._read_metrics)
        self._port: MetricsPort | None = None

    @property
    def http_url(self) -> str:
        scheme = "https" if self._config.public_tls_cert or self._config.tls_cert else "http"
        return f"{scheme}://{addresses.join(self._config.host, self._http_port)}"

    @property
    def grpc_address(self) -> str:
        return addresses.join(self._config.host, self._grpc.getsockname()[1])

    @property
    def pids(self) -> list[int]:
        """Pids of the serving processes by index; 0 for one that does not serve."""
        found = (self._children.get(index) for index in range(self._config.processes))
        return [child.pid if child is not None and child.serves else 0 for child in found]

    async def start(self) -> None:
        """Raises SetupError where a process does not start."""
        if self._config.metrics_port is not None:
            self._port = MetricsPort(self._config, self.metrics, self.why_not_ready, self._children)
        loop = asyncio.get_running_loop()
        serving = [loop.create_future() for _ in range(self._config.processes)]
        self._tasks = [loop.create_task(self._supervise(index, first)) for index, first in enumerate(serving)]
        for task in self._tasks:
            task.add_done_callback(self._supervised)
        await asyncio.gather(*serving)
        self._watch.start()
        self._snapshots.start()

    def why_not_ready(self) -> list[str]:
        """Any thread."""
        return ["draining: this router leaves"] if self._draining.is_set() else why_not_ready(self._memory)

    async def _supervise(self, index: int, first: asyncio.Future[None]) -> None:
        """Keep one process running until the router leaves. `first` is done once it serves, or did not start."""
        restarts = Restarts()
        while not self._draining.is_set():
            began = time.monotonic()
            child, end = await self._live(index, first)
            served = child is not None and child.serves
            if self._draining.is_set():
                break
            if not first.done():
                first.set_exception(SetupError(f"process {index} of this router {end} before it served"))
                return
            pause = restarts.pause_after(time.monotonic() - began, served=served)
            if pause is None:
                text = f"process {index} {end}: too often in a row"
                log.error("%s; this router leaves", text)
                if not self.failed.done():
                    self.failed.set_result(text)
                return
            log.warning("process %d %s; it starts again in %.1f s", index, end, pause)
            self._restarts.inc()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause):
                    await self._draining.wait()
        if not first.done():
            first.cancel()

    def _supervised(self, task: asyncio.Task[None]) -> None:
        """An error ends the router: the process would never be started again."""
        if task.cancelled() or (error := task.exception()) is None:
            return
        log.error("a process is no longer supervised; this router leaves", exc_info=error)
        if not self.failed.done():
            self.failed.set_result(f"a process is no longer supervised: {error!r}")

    async def _live(self, index: int, first: asyncio.Future[None]) -> tuple[ChildProcess | None, str]:
        """One life of a process. Returns it, and how it ended."""
        config = self._config
        ports = self._http_port, self._grpc.getsockname()[1]
        child = ChildProcess(index, process_config(config, index, *ports), self.metrics.encoded)
        try:
            await child.start(config.router_id, self._memory, self._http)
        except OSError as error:
            return None, f"does not start: {error}"
        self._children[index] = child
        self.metrics.add(child)
        if self._draining.is_set():
            child.signal(signal.SIGTERM)  # it has no requests; `close` may have stopped all others already
        telling = asyncio.create_task(self._tell_started(child, first))
        try:
            code = await child.wait()
        finally:
            telling.cancel()
            self._memory.reclaim(index)  # first: its places are free whatever else fails
            del self._children[index]
            self.metrics.ended(child)
            if not self._draining.is_set():  # whatever it did to the sockets that all share
                allow_connections(self._http)
        return child, ending(code)

    async def _tell_started(self, child: ChildProcess, first: asyncio.Future[None]) -> None:
        try:
            async with asyncio.timeout(START_SECONDS):
                await asyncio.shield(child.started)
        except TimeoutError:
            log.error("process %d does not serve within %.0f s; it is killed", child.index, START_SECONDS)
            child.signal(signal.SIGKILL)
            return
        if not first.done():
            first.set_result(None)
        self._changed()

    def _silent(self, child: ChildProcess) -> bool:
        """Whether its last beat is too old, or none has come; before the first one it holds no request."""
        silent = self._memory.slot(child.index).silent_seconds()
        return silent is None or silent > SUSPECT_SECONDS

    async def _read_metrics(self) -> None:
        await self.metrics.collect()

    # --- the end -------------------------------------------------------------------------------------------------

    async def close(self) -> None:
        """Drain and end all processes. No connection that waits to be accepted is reset."""
        self._draining.set()
        await self._watch.close()
        began, config = time.monotonic(), self._config
        for child in self._children.values():
            child.send({"do": "drain"})
        children = list(self._children.values())
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(drain_limit_seconds(config)):
                await asyncio.gather(*(child.drained.wait() for child in children))
        refuse_connections(self._http)
        for child in self._children.values():
            child.send({"do": "stop"})
            if not child.drained.is_set() and self._silent(child):
                log.error("process %d does not answer; it is killed", child.index)
                child.signal(signal.SIGKILL)
        for listener in self._http:  # the processes have it too: the last one that closes it closes the port
            listener.close()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=kill_limit_seconds(config) - (time.monotonic() - began))
        for child in self._children.values():
            log.error("process %d does not end; it is killed", child.index)
            child.signal(signal.SIGKILL)
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._snapshots.close(SNAPSHOT_SECONDS)
        if self._port is not None:
            await asyncio.to_thread(self._port.close)
        self._grpc.close()
        self._memory.close()


def ending(code: int) -> str:
    """How a process ended, by its code as of subprocess."""
    if code >= 0:
        return f"ended with code {code}"
    try:
        return f"was ended by {signal.Signals(-code).name}"
    except ValueError:  # real-time signals between the first and the last have no name
        return f"was ended by signal {-code}"


class Watch:
    """Kills processes whose event loop has stood still for LOOP_STALL_SECONDS, so that they are started again."""

    def __init__(self, memory: SharedMemory, children: dict[int, ChildProcess]):
        self._memory = memory
        self._children = children
        self._due = 0.0
        self._lenient_until = 0.0
        self._watching = Periodic("watching the processes", WATCH_SECONDS, self._look)

    def start(self) -> None:
        self._due = time.monotonic() + WATCH_SECONDS
        self._watching.start()

    async def close(self) -> None:
        await self._watching.close(WATCH_SECONDS)

    async def _look(self) -> None:
        now = time.monotonic()
        if now > self._due + LATE_SECONDS:
            self._lenient_until = now + LOOP_STALL_SECONDS
        self._due = now + WATCH_SECONDS
        for child in [] if now < self._lenient_until else list(self._children.values()):
            silent = self._memory.slot(child.index).silent_seconds() if child.serves else None
            if silent is not None and silent > LOOP_STALL_SECONDS:
                log.error("the event loop of process %d has stood still for %.0f s", child.index, silent)
                child.signal(signal.SIGKILL)
