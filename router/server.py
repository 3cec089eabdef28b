"""A running router: its services, its two endpoints, and what it does beside serving."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import gc
import sys
import time
from functools import partial
from typing import Any

from cluster import addresses
from cluster.config.router import RouterConfig
from cluster.faults.orders import open_faults
from cluster.membership.reader import Members
from cluster.periodic import Periodic
from cluster.protocol.times import LOOP_STALL_SECONDS
from cluster.redis.rights import RightsWatch
from cluster.security.expiry import seconds_left
from cluster.security.identity import Identity, make_identity
from cluster.security.key_file import ApiKeys
from cluster.security.tls import Peers
from cluster.telemetry.exposition import MetricsServer
from cluster.telemetry.loop_lag import LoopLag
from cluster.telemetry.metrics import process
from cluster.telemetry.registry import Registry
from cluster.telemetry.scrape import ScrapeCollector
from cluster.telemetry.tracing.setup import open_tracing
from router.admission.descriptors import within_descriptors
from router.dispatch.channels import Channels
from router.dispatch.services import Services
from router.gateway import RequestGateway
from router.grpc_endpoint import GrpcEndpoint
from router.http_endpoint import GRACE_SECONDS, HttpEndpoint
from router.link.links import Links
from router.observe import cluster
from router.observe.requests import RouterMetrics
from router.placement.placement import Placement
from router.processes import snapshots
from router.processes.member import Member, drain_limit_seconds
from router.quota.quota import Quota
from router.request.served_model import NameWatch
from router.rights import redis_rights
from router.text.tokenizer import ModelText

REFRESH_SECONDS = 0.5
POLL_SECONDS = 0.02
QUIET_SECONDS = 0.5
# Python's default scans the objects of every stream after each 700 new ones, and as few objects are left after the freeze,
# it makes full collections often. Few objects here are in cycles: collecting them this late costs some MiB. No collection
# but a full one scans more than 25,000 objects, which takes about 8 ms: 400,000 of a flood of connections took 0.3 s.
GC_THRESHOLDS = (5_000, 5, 800)
LONG_BYTES = 256 << 10
_M_MMAP_THRESHOLD, _M_TRIM_THRESHOLD = -3, -1  # malloc.h


class Router:
    """`start`, then serve until `close`. Raises ConfigError or ModelError before it listens."""

    def __init__(self, config: RouterConfig, member: Member | None = None):
        """`member`: where this is one of the router's processes."""
        self._config = config = within_descriptors(config)
        self._registry = registry = Registry(aliases=config.metrics_aliases, model=config.served_name)
        inside = make_identity(config.tls_cert, config.tls_key, config.tls_ca)
        self._services = _services(config, registry, inside)
        self._loop_lag = LoopLag()
        registry.add(cluster.collectors(self._services, self._loop_lag.seconds))
        self._keys = ApiKeys(
            config.api_keys_file, aliases=config.models_by_alias(), models=config.model_names
        )
        metrics = RouterMetrics(registry, config.model_names)
        self.gateway = RequestGateway(self._services, metrics, self._keys, member)
        self._member = member
        self._names = NameWatch()
        identity = make_identity(
            config.public_tls_cert or config.tls_cert,
            config.public_tls_key or config.tls_key,
            config.tls_client_ca,
        )
        ask_clients = config.tls_client_ca is not None
        shown_cert = "public_tls_cert" if config.public_tls_cert else "tls_cert"
        expires = partial(
            seconds_left, (inside, "tls_cert", "tls_ca"), (identity, shown_cert, "tls_client_ca")
        )
        registry.add([ScrapeCollector([process.CERTIFICATE_EXPIRES.read(expires)])])
        self._http = HttpEndpoint(config, self.gateway, identity, ask_clients=ask_clients, member=member)
        self._grpc = GrpcEndpoint(config, self.gateway, identity, ask_clients=ask_clients)
        self._refreshing = Periodic("refreshing health and connections", REFRESH_SECONDS, self._refresh)
        # Apart: keys of many tenants take seconds to parse, and the process would count as silent for as long.
        self._reading = Periodic("reading keys and certificates", REFRESH_SECONDS, self._read_files)
        self._serving: asyncio.Task[None] | None = None
        self._without_parent: asyncio.Task[None] | None = None
        self._drain_until = 0.0  # monotonic seconds: the end of the drain limit
        self._turned = time.monotonic()
        self._metrics: MetricsServer | None = None
        self._watches = [RightsWatch(url, needed) for url, needed in redis_rights(config)]

    @property
    def http_url(self) -> str:
        return self._http.url

    @property
    def grpc_address(self) -> str:
        return self._grpc.address

    @property
    def metrics_address(self) -> str:
        """Empty where metrics are only at the HTTP endpoint."""
        return addresses.join(self._config.host, self._metrics.port) if self._metrics is not None else ""

    def snapshot(self) -> list[Any]:
        """This process's metrics, for the router's parent. Any thread."""
        return snapshots.encode(self._registry.collect())

    async def start(self) -> None:
        await asyncio.gather(self._services.members.start(), self._services.wanted_adapters.start())
        await self._services.placement.start()
        self.gateway.live.start()
        await self._grpc.start()
        self._loop_lag.start()
        self._open_metrics()
        self._serving = asyncio.get_running_loop().create_task(self._http.serve())
        if self._member is not None:
            self._without_parent = asyncio.create_task(self._close_ports(self._member))
        self._refreshing.start()
        self._reading.start()
        for watch in self._watches:
            watch.start()
        # The objects of now live as long as the process: about 100,000, and a full collection that scanned them would
        # hold every stream for 50 ms.
        return_long_blocks()
        gc.collect()
        gc.freeze()
        gc.set_threshold(*GC_THRESHOLDS)

    def _open_metrics(self) -> None:
        config = self._config
        if config.metrics_port is not None:
            probes = {"ready": self.gateway.why_not_ready, "live": self._why_not_live}
            facts = {"router": config.router_id}
            self._metrics = MetricsServer(config.host, config.metrics_port, self._registry, probes, facts)

    def _why_not_live(self) -> list[str]:
        """Called on the probes' threads, which run on when the event loop stands still."""
        silent = time.monotonic() - self._turned
        return [f"the event loop has stood still for {silent:.0f} s"] if silent > LOOP_STALL_SECONDS else []

    async def _refresh(self) -> None:
        """Health follows readiness, connections to workers that are gone are closed."""
        self._turned = time.monotonic()
        self.gateway.beat()
        self._names.look(self.gateway.models)
        self._grpc.show_ready(self.gateway.ready())
        workers = self._services.members.all
        self._services.channels.keep_only({worker.address for worker in workers})
        self._services.links.keep_only(workers)

    async def _read_files(self) -> None:
        """Read again the files that have changed."""
        await asyncio.to_thread(self._keys.refresh)
        await asyncio.to_thread(self._http.refresh)

    async def drain(self) -> None:
        """Fail readiness at once; after a moment for load balancers to notice, admit nothing more but on open HTTP
        connections. Returns when every request has finished, or the drain limit has passed."""
        self.gateway.leave()
        self._grpc.health.leave()
        await asyncio.sleep(self._config.drain_delay_seconds)
        self.gateway.refuse_new(self._http.connections)
        self._drain_until = deadline = time.monotonic() + self._config.drain_seconds
        stopping = asyncio.create_task(self._grpc.stop(self._config.drain_seconds))
        quiet = 0.0
        while (
            self.gateway.admission.in_flight or quiet < self._quiet_seconds()
        ) and time.monotonic() < deadline:
            quiet = 0.0 if self.gateway.admission.in_flight else quiet + POLL_SECONDS
            await asyncio.sleep(POLL_SECONDS)
        stopping.cancel()
        await asyncio.gather(stopping, return_exceptions=True)

    def _quiet_seconds(self) -> float:
        """A client that has just read the end of an answer may send its next request at once."""
        return QUIET_SECONDS if self._http.connections else 0.0

    async def close(self) -> None:
        """Drain, stop listening, and end what is left."""
        await self.drain()
        if self._member is not None:
            await self._all_drained(self._member)
        if self._without_parent is not None:
            await self._ports_closed(self._without_parent)
        await self._http.accept_last()
        await self._last_requests()
        self._http.stop()
        await self._grpc.stop(GRACE_SECONDS)
        await self._refreshing.close(GRACE_SECONDS)
        await self._reading.close(GRACE_SECONDS)
        if self._serving is not None:
            await asyncio.gather(self._serving, return_exceptions=True)
        await self._services.finish(GRACE_SECONDS)
        await self.gateway.live.close()
        await self._services.close()
        self._loop_lag.stop()
        for watch in self._watches:
            await asyncio.to_thread(watch.stop)
        if self._metrics is not None:
            await asyncio.to_thread(self._metrics.close)

    async def _last_requests(self) -> None:
        """Wait for requests that have come on open connections since `drain` returned, until the drain limit: the router's
        other processes may have drained for longer. Others find the port closed."""
        if self.gateway.admission.in_flight:
            await self._http.close_port()
        while self.gateway.admission.in_flight and time.monotonic() < self._drain_until:
            await asyncio.sleep(POLL_SECONDS)

    async def _close_ports(self, member: Member) -> None:
        """Close the ports once the parent is gone, so that a new router can have them; what is open is served until
        `close`."""
        await member.parent.ended.wait()
        await asyncio.gather(self._http.close_port(), self._grpc.stop(self._config.drain_seconds))

    async def _ports_closed(self, closing: asyncio.Task[None]) -> None:
        """If they are being closed, because the parent is gone; else they stay as they are."""
        assert self._member is not None, "it closes for a process"
        if not self._member.parent.ended.is_set():
            closing.cancel()
        await asyncio.gather(closing, return_exceptions=True)

    async def _all_drained(self, member: Member) -> None:
        """Wait for the router's other processes, which serve from the same port: the last of them closes it."""
        await member.parent.report({"drained": True})
        limit = drain_limit_seconds(self._config)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(limit):
                await member.parent.stop_wanted.wait()


def _services(config: RouterConfig, registry: Registry, inside: Identity | None) -> Services:
    members = Members(config.redis_url, config.namespace)
    peers = Peers(inside if config.tls_ca else None)
    faults = open_faults(config.fault_orders, config.router_id)
    cache_bytes = config.tokenized_cache_bytes_of_model
    return Services(
        config,
        ModelText(config.model, cache_bytes),
        members,
        Placement(config, members),
        Channels(peers),
        Links(config.router_id, peers, faults),
        Quota(config.redis_url, config.namespace, registry),
        open_tracing(config, "baton-router", config.router_id),
        faults,
        {one.name: ModelText(one.model, cache_bytes) for one in config.models},
    )


def return_long_blocks() -> None:
    """Make glibc return freed blocks of LONG_BYTES and more to the system at once.

    By default it does so only until the first long block is freed; later ones of that length come from the heap, where a
    freed block between others stays: after a thousand bodies of 4 MiB a router held 1 GiB. Other C libraries stay as they
    are.
    """
    if sys.platform != "linux":
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, LONG_BYTES)
        mallopt(_M_TRIM_THRESHOLD, 2 * LONG_BYTES)
