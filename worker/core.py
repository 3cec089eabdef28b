"""What a worker is, whatever its role: an engine on its thread, a server, an identity, a place in the cluster."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import socket
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, TypeVar

import redis
from prometheus_client.registry import Collector

from cluster.addresses import advertised, join
from cluster.background_tasks import FollowUps
from cluster.config.worker import WorkerConfig
from cluster.errors import BatonError, DrainingError, EngineFailedError, StaleEpochError
from cluster.faults.orders import open_faults
from cluster.index.reporter import ChainReporter
from cluster.kubernetes.pod import Pod, own_pod
from cluster.membership.reader import read_workers
from cluster.membership.registration import Registration
from cluster.membership.status import WorkerStatus
from cluster.membership.topology import Locating
from cluster.membership.types import Then, WorkerInfo
from cluster.protocol.times import LOST_SECONDS
from cluster.protocol.wire_version import WIRE_VERSION
from cluster.security.tls import worker_peers
from cluster.telemetry.exporter import MetricsServer
from cluster.telemetry.loop_lag import LoopLag
from cluster.telemetry.registry import Registry
from cluster.telemetry.tracing.setup import open_tracing
from engine.engine import Engine
from engine.request import ChainReport, StepOutput
from wire import common_pb2
from worker.engine_host import EngineHost
from worker.health import Health, Phase
from worker.model_id import make_model_id
from worker.ranks.process import RankRaised
from worker.ranks.ranks import Ranks, open_ranks
from worker.self_check import SelfCheck
from worker.server import WorkerServer
from worker.validate import SpecLimits

if TYPE_CHECKING:
    from opentelemetry.context import Context

log = logging.getLogger(__name__)
T = TypeVar("T")
RESYNC_SECONDS = 10.0
REJOIN_SECONDS = 10.0
LAST_EVENT_SECONDS = 0.25
RANK_DEATH_SECONDS = 0.25  # between a step that a dead rank broke and the end of its pipe


class WorkerCore:
    """Owns the engine, the gRPC server and the registration. A role adds its service and hears `on_output`.

    Life: construct (model is loaded) → `start` → serving → draining (worker/drain.py) → `stop`.
    """

    def __init__(self, config: WorkerConfig):
        """Loads the model. Raises ModelError or ConfigError."""
        self.config = config
        self.health = Health(config.step_stall_seconds)
        self._locating = Locating(config.topology)
        self._advertised_host = advertised(config.host, config.advertise_host, config.redis_url)
        labels = {"worker": self.worker_id, "role": config.role}
        self._registry = Registry(labels, aliases=config.metrics_aliases, model=config.engine.model.name)
        probes = {"ready": self.health.why_not_ready, "live": self.health.why_not_live}
        self._exporter = MetricsServer(config.host, config.metrics_port, self._registry, probes, labels)
        self._loop = asyncio.get_running_loop()
        self.failed: asyncio.Future[BaseException] = self._loop.create_future()
        self.drain_wanted: asyncio.Future[Then] = self._loop.create_future()
        self.epoch = secrets.randbits(64) or 1
        self.faults = open_faults(config.fault_orders, config.worker_id)
        try:
            self.model_id = make_model_id(config.engine.model, config.engine.dtype)
            self.ranks = self._load()
        except BaseException:
            self._exporter.close()
            raise
        self.runner = runner = self.ranks.runner
        self.page_size = runner.page_size
        self.on_output: Callable[[StepOutput], None] = lambda output: None
        self.on_failed: Callable[[BatonError], None] = lambda word: None
        self.on_fenced: Callable[[], Awaitable[None]] = _nothing
        self.status: Callable[[WorkerStatus], WorkerStatus] = lambda status: (
            status
        )  # adds what the role publishes
        self.collectors: list[Collector] = []
        self.books: list[Callable[[], None]] = []  # of the role; AssertionError: one does not add up
        self.loop_lag = LoopLag()
        self.fenced = 0
        self.tracing = open_tracing(config, f"baton-{config.role}", config.worker_id)
        self._registration: Registration | None = None
        self._reporter: ChainReporter | None = None
        self._ticking: asyncio.Task[None] | None = None
        self._watching: asyncio.Task[None] | None = None
        self._self_check: SelfCheck | None = None
        self._checking: asyncio.Task[None] | None = None
        self.follow_ups = FollowUps()
        self.engine = Engine(
            runner, runner.config, secret=config.secret.encode(), on_chain=self._chain_changed
        )
        self.host = EngineHost(
            self.engine,
            on_output=self._output,
            on_failure=self._engine_failed,
            step_stall_seconds=config.step_stall_seconds,
            ranks_answer=self.ranks.watch.healthy,
        )
        self.health.engine_moves = self.host.healthy
        self.peers = worker_peers(config)
        self.server = WorkerServer(config.host, config.port, self.peers, self._advertised_host)
        self.server.bind()
        self.health.to(Phase.STARTING)

    def _load(self) -> Ranks:
        ranks = open_ranks(self.config, self.epoch)
        for rank in ranks.remote:
            rank.on_failed = self._rank_failed
            rank.on_leaving = lambda: self._drain_wanted_from_thread("exit")
        self.health.to(Phase.WARMING_UP)
        ranks.warm_up()
        return ranks

    @property
    def worker_id(self) -> str:
        return self.config.worker_id

    @property
    def metrics_address(self) -> str:
        return join(self._advertised_host, self._exporter.port)

    @property
    def ref(self) -> common_pb2.WorkerRef:
        return common_pb2.WorkerRef(worker_id=self.worker_id, epoch=self.epoch, address=self.server.address)

    @property
    def layout(self) -> common_pb2.KvLayout:
        """What a pair compares field by field before KV moves."""
        model = self.runner.model_config
        return common_pb2.KvLayout(
            wire_version=WIRE_VERSION,
            model_id=self.model_id,
            dtype=self.runner.config.dtype,
            page_size=self.page_size,
            num_layers=model.num_layers,
            num_kv_heads=model.num_kv_heads,
            head_dim=model.head_dim,
            tensor_parallel=self.runner.config.tensor_parallel,
        )

    @property
    def spec_limits(self) -> SpecLimits:
        """What a request's description is checked against."""
        config = self.runner.config
        return SpecLimits(self.model_id, self.runner.model_config.vocab_size, config.max_batch_requests)

    def beat_step(self) -> int | None:
        """The step counter of a beat; None while the engine or a rank hangs, so that beats stop."""
        return self.host.steps if self._speaks() else None

    def _speaks(self) -> bool:
        """Whether beats and lease renewals are sent."""
        return self.host.healthy() and self.ranks.watch.prompt()

    def trace_of(self, spec: common_pb2.GenerateSpec) -> Context | None:
        """The router's span that this worker's spans hang on. None: nothing of the request is traced here."""
        if self.tracing is None or not spec.trace_parent:
            return None
        return self.tracing.remote_parent(spec.trace_parent, spec.trace_state)

    def check_epoch(self, epoch: int) -> None:
        if epoch != self.epoch:
            raise StaleEpochError(
                f"{self.worker_id} now lives under another epoch; look its registration up again",
                field="worker_epoch",
            )

    def check_accepting(self) -> None:
        if self.health.draining:
            raise DrainingError(f"{self.worker_id} is draining", field="worker", retry_after_seconds=0.05)

    def spawn(self, coroutine: Coroutine[Any, Any, Any]) -> None:
        """Runs a short follow-up; its failure is logged, its end awaited at stop."""
        self.follow_ups.spawn(coroutine)

    async def start(self) -> None:
        self.host.start()
        await self.server.start()
        self._ticking = self._loop.create_task(self.health.tick())
        self._watching = self._loop.create_task(
            self.ranks.watch.run(self._engine_failed, self.config.step_stall_seconds)
        )
        self.loop_lag.start()
        if self.config.fault_orders is not None:
            self._self_check = SelfCheck(self.host, self.books)
            self._checking = self._loop.create_task(self._self_check.run())
        self._registry.add(self.collectors)
        if self.config.redis_url:
            self._register()
        self.health.to(Phase.SERVING)

    @property
    def registration(self) -> Registration | None:
        return self._registration

    @property
    def reports_waiting(self) -> int:
        """Prefix chains that the index has not been told of."""
        return self._reporter.waiting if self._reporter is not None else 0

    def _register(self) -> None:
        location = self._locating.location()
        info = WorkerInfo(
            worker_id=self.worker_id,
            epoch=self.epoch,
            slot=0,
            role=self.config.role,
            model_id=self.model_id,
            address=self.server.address,
            metrics_address=self.metrics_address,
            layout=self.layout.SerializeToString(),
            place=location.place,
            host=socket.gethostname(),
            max_model_len=self.runner.model_config.max_model_len,
            blocks_total=self.runner.num_blocks,
            page_size=self.page_size,
            location=location,
            # A proof that this process has exited would not cover ranks on other nodes.
            pod=own_pod() if self.config.engine.nodes == 1 else Pod(),
        )
        self._registration = registration = Registration(
            self.config.redis_url,
            self.config.namespace,
            info,
            healthy=self._speaks,
            status=self.published_status,
            rejoin=self._rejoin_from_thread,
            on_drain=self._drain_wanted_from_thread,
        )
        self._reporter = ChainReporter(
            self.config.redis_url,
            self.config.namespace,
            self.model_id,
            self._registration,
            self._held_chains,
        )
        self.health.registered = lambda: registration.slot != 0
        registration.start()
        self._reporter.start()

    def _rejoin_from_thread(self) -> int:
        return self._on_loop(self.rejoin(), REJOIN_SECONDS)

    def _on_loop(self, coroutine: Coroutine[Any, Any, T], seconds: float) -> T:
        """From another thread. Raises TimeoutError; nothing goes on behind it then."""
        asked = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        try:
            return asked.result(seconds)
        except TimeoutError:
            asked.cancel()
            raise

    def _drain_wanted_from_thread(self, then: Then) -> None:
        def tell() -> None:
            if not self.drain_wanted.done():
                self.drain_wanted.set_result(then)

        with contextlib.suppress(RuntimeError):  # the loop has closed: the worker has left
            self._loop.call_soon_threadsafe(tell)

    async def rejoin(self) -> int:
        """Fenced: from now on what is addressed to the old epoch is refused; what it began is ended. The prefix
        cache stays: blocks are what their hashes say, whoever counts epochs."""
        self.epoch = secrets.randbits(64) or 1
        self.fenced += 1
        await self.on_fenced()
        return self.epoch

    def _held_chains(self) -> list[tuple[list[bytes], int]]:
        """The whole prefix cache, asked on the reporter's thread, read on the engine's."""
        chains = self.host.call(lambda engine: [(chain.hashes, chain.held) for chain in engine.held_chains()])
        return self._on_loop(chains, RESYNC_SECONDS)

    def _output(self, output: StepOutput) -> None:
        self.on_output(output)

    def _rank_failed(self, error: Exception) -> None:
        """Fail the worker, which cannot compute without the rank. Any thread."""
        # With several ranks, the exit of one may be seen before the exception of another one, which caused it.
        at_once = isinstance(error, RankRaised) or len(self.ranks.remote) == 1
        handle = self._end_failed if at_once else self._engine_failed
        with contextlib.suppress(RuntimeError):  # the loop has closed: the worker ends anyway
            self._loop.call_soon_threadsafe(handle, error)

    def _engine_failed(self, error: BaseException) -> None:
        """Handle an exception of a step or the loss of a rank, on the loop. Its cause may be reported a moment later."""
        if self.ranks.remote:
            self._loop.call_later(RANK_DEATH_SECONDS, self._end_failed, error)
        else:
            self._end_failed(error)

    def _end_failed(self, error: BaseException) -> None:
        """Blame the requests of a failed step, unless the error is a BatonError: then a lost rank or peer is the cause."""
        if self.failed.done():
            return
        if not isinstance(error, BatonError):
            name = str(error) if isinstance(error, RankRaised) else type(error).__name__
            self.on_failed(EngineFailedError(f"the engine failed while it ran this request: {name}"))
        self.fail(error)

    def fail(self, error: BaseException) -> None:
        """End this worker. Its attempts end first, typed, so that routers need not wait for the connection to break."""
        if not self.failed.done():
            self.failed.set_result(error)
            self.on_failed(DrainingError(f"{self.worker_id} has failed and ends"))

    def published_status(self) -> WorkerStatus:
        """What `baton status` shows of this worker. Runs on the threads of registration and scrapes: it only reads."""
        stats = self.engine.stats()
        seen = stats.prompt_tokens_cached + stats.prompt_tokens_computed
        check = self._self_check
        status = WorkerStatus(
            pid=os.getpid(),
            phase=self.health.phase.name.lower(),
            **asdict(stats),
            kv_usage_ratio=stats.blocks_held / max(1, stats.blocks_total),
            prompt_tokens_asked=seen,
            prefix_hit_ratio=stats.prompt_tokens_cached / max(1, seen),
            self_checks=check.looks if check is not None else None,
            self_check_wrong=check.wrong if check is not None else None,
        )
        return self.status(status)

    def _chain_changed(self, chain: ChainReport) -> None:
        if self._reporter is not None:
            self._reporter.report(chain.hashes, chain.held)

    async def start_draining(self) -> None:
        """Nothing new from now on: probes, gRPC health and Redis say so."""
        self.health.to(Phase.DRAINING)
        await self.server.set_serving(False)
        if self._registration is not None:
            then = self.drain_wanted.result() if self.drain_wanted.done() else "exit"
            await asyncio.to_thread(self._registration.set_draining, then)

    async def has_successor(self) -> bool:
        """Is there another worker that could go on with what this one has begun? No, if Redis can't tell."""
        try:
            workers = await asyncio.to_thread(read_workers, self.config.redis_url, self.config.namespace)
        except (redis.RedisError, ValueError) as error:
            log.debug("successors are unknown: %s", error)
            return False
        return any(
            worker.worker_id != self.worker_id
            and (worker.role, worker.model_id) == (self.config.role, self.model_id)
            and (worker.state, worker.lease) == ("ready", "live")
            for worker in workers
        )

    async def cut_off(self) -> None:
        """End all streams after a failure, leaving a moment to send the last event of each, which has the reason."""
        await self.server.stop(LAST_EVENT_SECONDS)

    async def end_silent_ranks(self) -> None:
        """Kill silent ranks, for which the engine's thread would wait in a collective operation."""
        await asyncio.to_thread(self.ranks.watch.kill_silent, LOST_SECONDS)

    async def stop(self, grace_seconds: float = 1.0) -> None:
        """Leaves the cluster first, so that nothing new comes; then ends streams, follow-ups and the engine."""
        self.health.to(Phase.LEAVING)
        if self._registration is not None:
            await asyncio.to_thread(self._registration.stop)
        if self._reporter is not None:
            await asyncio.to_thread(self._reporter.stop)
        await self.server.stop(grace_seconds)
        self.loop_lag.stop()
        await self.follow_ups.wait(grace_seconds)
        for task in (self._ticking, self._watching, self._checking):
            if task is not None:
                task.cancel()
        await asyncio.to_thread(self._exporter.close)
        if self.tracing is not None:
            await asyncio.to_thread(self.tracing.close)
        await self.end_silent_ranks()
        await self.host.stop()
        await asyncio.to_thread(self.ranks.close, between_steps=self.host.ended_well)


async def _nothing() -> None:
    """No role yet."""
