"""A prefill or decode worker: an engine, a gRPC server, a registration, and the role that uses them."""

from __future__ import annotations

import os
from collections.abc import Collection
from dataclasses import asdict

from cluster.addresses import advertised
from cluster.background_tasks import BackgroundTasks
from cluster.config.worker import EngineConfig, WorkerConfig
from cluster.errors import DrainingError, InternalError
from cluster.faults.orders import open_faults
from cluster.faults.points import Faults
from cluster.membership.known_adapters import WantedReader
from cluster.membership.status import WorkerStatus
from cluster.membership.topology import Locating
from cluster.membership.types import Then
from cluster.periodic import Periodic
from cluster.ray_head import RayHeadWatch
from cluster.security.tls import Peers, worker_peers
from engine.request import ChainReport, StepOutput
from worker.adapters import POLL_SECONDS, AdapterChanges
from worker.ending import Ending, WorkerFailure
from worker.health import WITHOUT_RAY_HEAD, Health, Phase
from worker.identity import WorkerIdentity, draw_epoch
from worker.link.listener import LinkListener
from worker.loaded_engine import LoadedEngine
from worker.membership import Membership
from worker.metrics import of_worker
from worker.model_id import make_model_id
from worker.ranks.local import sized
from worker.role import MakeRole, RoleParts
from worker.self_check import SelfCheck
from worker.server import WorkerServer
from worker.shutdown import Shutdown
from worker.telemetry import WorkerTelemetry

GRACE_SECONDS = 1.0


class Worker:
    """Life: construct (the model is loaded) → `start` → serving → draining (worker/drain.py) → `stop`."""

    def __init__(self, config: WorkerConfig, make_role: MakeRole):
        """Load the model. Raises ModelError, ConfigError or SetupError."""
        config = self._config = sized(config)
        host = advertised(config.host, config.advertise_host, config.redis_url)
        locating = Locating(config.topology)  # looks the node's labels up while the model is loaded
        self._health = Health(config.worker_id, config.step_stall_seconds)
        self._telemetry = WorkerTelemetry(config, self._health, host)
        self._ending = Ending(config.engine.tensor_parallel - 1)
        self._background_tasks = BackgroundTasks()
        epoch = draw_epoch()
        try:
            model_id = _model_id(config.engine)
            self._engine = LoadedEngine(
                config,
                epoch,
                self._health,
                self._ending,
                on_output=self._output,
                on_chain=self._chain_changed,
            )
            peers = worker_peers(config)
            self._tls = peers.identity
            self._server = WorkerServer(config.host, config.port, peers, host)
            self._server.bind()
            faults = open_faults(config.fault_orders, config.worker_id)
            self._links = LinkListener(config.host, host, peers, faults)
            self._links.bind(config.link_port)
        except BaseException:
            self._telemetry.close()
            raise
        self._identity = WorkerIdentity(
            config,
            epoch,
            model_id,
            self._engine.ranks.runner,
            self._server.address,
            self._telemetry.metrics_address,
            self._links.address,
            self._engine.adapters,
        )
        self._membership = self._make_membership(config, locating)
        self._adapters = self._adapter_changes(config)
        self._following: Periodic | None = None
        self._ray_head: RayHeadWatch | None = None
        self._role = make_role(self._parts(peers, faults))
        self._ending.on_failure(self._failed)
        self._shutdown = self._make_shutdown(config)
        self._self_check = SelfCheck(self._engine.host, self._role.check_integrity)
        self._health.watch(
            engine_moves=self._engine.host.healthy,
            registered=lambda: self._membership.registered,
            ray_head_silent=self._ray_head_silent,
        )
        self._health.to(Phase.STARTING)

    def _make_membership(self, config: WorkerConfig, locating: Locating) -> Membership:
        return Membership(
            config,
            self._identity,
            locating,
            self._engine,
            self._ending,
            status=self.status,
            rejoin=self._rejoin,
        )

    def _make_shutdown(self, config: WorkerConfig) -> Shutdown:
        return Shutdown(
            config,
            self._role,
            health=self._health,
            ending=self._ending,
            server=self._server,
            membership=self._membership,
            engine=self._engine,
            close=self._close,
        )

    def _adapter_changes(self, config: WorkerConfig) -> AdapterChanges | None:
        if config.lora_dir is None or not config.redis_url:
            return None
        return AdapterChanges(
            self._engine.adapters,
            config.lora_dir,
            self._engine.host,
            served_model=config.served_model_name,
            wanted=WantedReader(config.redis_url, config.namespace).read,
            held=self._adapters_held,
            publish=self._membership.set_adapters,
        )

    def _adapters_held(self) -> Collection[str]:
        return self._role.adapters_held()  # made later than what calls this

    def _parts(self, peers: Peers, faults: Faults) -> RoleParts:
        return RoleParts(
            config=self._config,
            identity=self._identity,
            health=self._health,
            host=self._engine.host,
            ranks=self._engine.ranks,
            server=self._server,
            peers=peers,
            faults=faults,
            tracing=self._telemetry.tracing,
            background_tasks=self._background_tasks,
            fail=lambda reason: self._ending.fail(InternalError(reason)),
            drain_and_fail=lambda reason: self._background_tasks.spawn(self._drain_and_fail(reason)),
        )

    # --- for baton and the Ray pools ---------------------------------------------------------------------

    @property
    def worker_id(self) -> str:
        return self._identity.worker_id

    @property
    def epoch(self) -> int:
        return self._identity.epoch

    @property
    def address(self) -> str:
        return self._identity.address

    @property
    def metrics_address(self) -> str:
        return self._identity.metrics_address

    def healthy(self) -> bool:
        return self._engine.host.healthy() and not self._ending.has_failed

    def status(self) -> WorkerStatus:
        """The status that `baton status` shows and the registry holds. Any thread."""
        stats, check = self._engine.engine.stats(), self._self_check
        seen = stats.prompt_tokens_cached + stats.prompt_tokens_computed
        checked, ray_head = self._config.fault_orders is not None, self._ray_head
        status = WorkerStatus(
            pid=os.getpid(),
            phase=self._health.phase.name.lower(),
            **asdict(stats),
            kv_usage_ratio=stats.blocks_held / max(1, stats.blocks_total),
            prompt_tokens_asked=seen,
            prefix_hit_ratio=stats.prompt_tokens_cached / max(1, seen),
            takes_adapters=int(self._adapters is not None),
            ray_head=ray_head.address if ray_head is not None else None,
            ray_head_silent_seconds=ray_head.silent_seconds if ray_head is not None else 0.0,
            adapters_refused=self._adapters.refused_text if self._adapters is not None else None,
            self_checks=check.count if checked else None,
            self_check_wrong=check.failure if checked else None,
        )
        return self._role.status(status)

    def watch_ray_head(self, address: str) -> None:
        """Report from now on whether the head at `address` responds: the one that places this worker's ranks, or that of
        the replica that supervises this worker, which may change."""
        if self._ray_head is not None:
            if self._ray_head.address == address:
                return
            self._ray_head.close()
        self._ray_head = RayHeadWatch(address, means=WITHOUT_RAY_HEAD)

    def _ray_head_silent(self) -> str:
        return self._ray_head.why_silent if self._ray_head is not None else ""

    async def wait_failed(self) -> BaseException:
        return await self._ending.failure()

    async def wait_drain_wanted(self) -> Then:
        """Wait until `baton drain` names this worker."""
        return await self._ending.drain_asked()

    async def start(self) -> None:
        self._engine.start()
        await self._server.start()
        self._links.start(self._role.routers, self._identity, self._engine.beat_step)
        lag, status = self._telemetry.loop_lag, self.status
        collectors = of_worker(
            self._engine, self._health, self._identity, self._membership, lag, status, self._tls
        )
        self._telemetry.start([*collectors, *self._role.collectors()])
        if self._config.fault_orders is not None:
            self._self_check.start()
        if self._adapters is not None:
            self._following = Periodic("loading adapters", POLL_SECONDS, self._adapters.follow)
            self._following.start()
            await self._adapters.wait_followed()
        self._membership.start()
        if self._engine.ranks.ray_head:
            self.watch_ray_head(self._engine.ranks.ray_head)
        self._health.to(Phase.SERVING)
        await self._role.start()

    async def stop(self) -> None:
        """Finish what runs within the drain limit, return the rest to routers, then leave. Once, however often called."""
        await self._shutdown.stop()

    # --- called by its parts -----------------------------------------------------------------------------

    def _output(self, output: StepOutput) -> None:
        self._role.on_output(output)

    def _chain_changed(self, chain: ChainReport) -> None:
        self._membership.report(chain.hashes, chain.held)

    def _failed(self, failure: WorkerFailure) -> None:
        """End the attempts, with their reasons, so that routers need not wait for the connection to break."""
        if failure.engine is not None:
            self._role.failed(failure.engine)
        self._role.failed(DrainingError(f"{self.worker_id} has failed and ends"))

    async def _rejoin(self) -> int:
        """Refuse calls to the old epoch and end what it began. The prefix cache stays: hashes do not depend on epochs."""
        self._identity.renew_epoch()
        self._role.routers.fence()
        await self._role.fenced()
        return self.epoch

    async def _drain_and_fail(self, reason: str) -> None:
        await self._shutdown.drain()
        self._ending.fail(InternalError(reason))

    async def _close(self) -> None:
        """Leave the registry first, so that nothing new is placed here; then end what runs."""
        self._health.to(Phase.LEAVING)
        if self._following is not None and self._adapters is not None:
            self._adapters.stop()
            await self._following.close(GRACE_SECONDS)
        await self._membership.stop()
        await self._server.stop(GRACE_SECONDS)
        await self._links.stop()
        await self._background_tasks.wait(GRACE_SECONDS)
        self._self_check.stop()
        if self._ray_head is not None:
            self._ray_head.close()
        await self._telemetry.stop()
        await self._engine.stop()


async def start_worker(config: WorkerConfig, make_role: MakeRole) -> Worker:
    """Load the model, then serve. Raises ModelError, ConfigError or SetupError."""
    worker = Worker(config, make_role)
    await worker.start()
    return worker


def _model_id(engine: EngineConfig) -> str:
    return make_model_id(
        engine.model,
        engine.dtype,
        engine.quantization,
        max_model_len=engine.max_model_len,
        kv_dtype=engine.kv_dtype,
    )
