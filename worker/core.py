"""What a worker is, whatever its role: an engine on its thread, a server, an identity, a place in the cluster."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import socket
import time
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import asdict
from typing import Any

from cluster.config import WorkerConfig
from cluster.errors import InternalError, StaleEpochError, UnavailableError
from cluster.follow_ups import FollowUps
from cluster.index.reporter import ChainReporter
from cluster.membership.registration import Registration
from cluster.membership.types import WorkerInfo
from cluster.telemetry.exporter import Exporter
from cluster.tls import Peers, make_identity
from engine.engine import Engine
from engine.request import ChainReport, StepOutput
from wire import common_pb2
from worker.build import make_model_id
from worker.engine_host import EngineHost
from worker.ranks import open_ranks
from worker.server import WorkerServer

log = logging.getLogger(__name__)
WIRE_VERSION = 1
RESYNC_SECONDS = 10.0
REJOIN_SECONDS = 10.0


class WorkerCore:
    """Owns the engine, the gRPC server and the registration. A role adds its service and hears `on_output`.

    Life: construct (model is loaded) → `start` → serving → `drain` → `stop`.
    """

    def __init__(self, config: WorkerConfig):
        """Loads the model. Raises ModelError or ConfigError."""
        self.config = config
        self.model_id = make_model_id(config.engine.model)
        self._loop = asyncio.get_running_loop()
        self.epoch = secrets.randbits(64) or 1
        self.ranks = open_ranks(config, self.epoch)
        self.runner = runner = self.ranks.runner
        runner.warm_up()
        for rank in self.ranks.remote:
            rank.on_exit = self._rank_exited
        self.failed: asyncio.Future[BaseException] = asyncio.get_running_loop().create_future()
        self.page_size = runner.page_size
        self.on_output: Callable[[StepOutput], None] = lambda output: None
        self.on_fenced: Callable[[], Awaitable[None]] = _nothing
        self.status: Callable[[], dict[str, Any]] = dict
        self.draining = False
        self._registration: Registration | None = None
        self._reporter: ChainReporter | None = None
        self._exporter: Exporter | None = None
        self.follow_ups = FollowUps()
        self.engine = Engine(
            runner, runner.config, secret=config.secret.encode(), on_chain=self._chain_changed
        )
        self.host = EngineHost(
            self.engine,
            on_output=self._output,
            on_failure=self._engine_failed,
            step_stall_seconds=config.step_stall_seconds,
        )
        self.peers = Peers(make_identity(config.tls_cert, config.tls_key, config.tls_ca))
        self.server = WorkerServer(config.host, config.port, self.peers)
        self.server.bind()

    @property
    def worker_id(self) -> str:
        return self.config.worker_id

    @property
    def metrics_address(self) -> str:
        """Empty before `start`."""
        return self._exporter.address if self._exporter is not None else ""

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

    def beat_step(self) -> int | None:
        """The step counter a beat carries; None while the engine hangs: a hung engine is a dead one."""
        return self.host.steps if self.host.healthy() else None

    def check_epoch(self, epoch: int) -> None:
        if epoch != self.epoch:
            raise StaleEpochError(
                f"{self.worker_id} now lives under another epoch; look its registration up again",
                field="worker_epoch",
            )

    def check_accepting(self) -> None:
        if self.draining:
            raise UnavailableError(f"{self.worker_id} is draining", retry_after_seconds=0.5)

    def spawn(self, coroutine: Coroutine[Any, Any, Any]) -> None:
        """Runs a short follow-up; its failure is logged, its end awaited at stop."""
        self.follow_ups.spawn(coroutine)

    async def start(self) -> None:
        self.host.start()
        await self.server.start()
        config = self.config
        self._exporter = Exporter(
            config.host, config.metrics_port, self._status, worker=self.worker_id, role=config.role
        )
        if self.config.redis_url:
            self._register()

    def _register(self) -> None:
        info = WorkerInfo(
            worker_id=self.worker_id,
            epoch=self.epoch,
            slot=0,
            role=self.config.role,
            model_id=self.model_id,
            address=self.server.address,
            metrics_address=self.metrics_address,
            layout=self.layout.SerializeToString(),
            place=self.config.place,
            host=socket.gethostname(),
            max_model_len=self.runner.model_config.max_model_len,
            blocks_total=self.runner.num_blocks,
        )
        self._registration = Registration(
            self.config.redis_url,
            self.config.namespace,
            info,
            healthy=self.host.healthy,
            status=self._status,
            rejoin=self._rejoin_from_thread,
        )
        self._reporter = ChainReporter(
            self.config.redis_url,
            self.config.namespace,
            self.model_id,
            self._registration,
            self._held_chains,
        )
        self._registration.start()
        self._reporter.start()

    def _rejoin_from_thread(self) -> int:
        return asyncio.run_coroutine_threadsafe(self.rejoin(), self._loop).result(REJOIN_SECONDS)

    async def rejoin(self) -> int:
        """Fenced: from now on what is addressed to the old epoch is refused; what it began is ended. The prefix
        cache stays: blocks are what their hashes say, whoever counts epochs."""
        self.epoch = secrets.randbits(64) or 1
        await self.on_fenced()
        return self.epoch

    def _held_chains(self) -> list[tuple[list[bytes], int]]:
        """The whole prefix cache, asked on the reporter's thread, read on the engine's."""
        asked = asyncio.run_coroutine_threadsafe(
            self.host.call(lambda engine: [(chain.hashes, chain.held) for chain in engine.held_chains()]),
            self._loop,
        )
        return asked.result(RESYNC_SECONDS)

    def _output(self, output: StepOutput) -> None:
        self.on_output(output)

    def _rank_exited(self, rank: int) -> None:
        """On the pipe's thread: a worker without one of its ranks can compute nothing."""
        error = InternalError(f"rank {rank} has died")
        with contextlib.suppress(RuntimeError):  # the loop has closed: the worker ends anyway
            self._loop.call_soon_threadsafe(self._engine_failed, error)

    async def leave(self, error: BaseException, idle: Callable[[], bool]) -> None:
        """For a reason only a new process can mend: drains, then ends as failed, so that it is started again."""
        await self.drain(idle)
        self._engine_failed(error)

    def _engine_failed(self, error: BaseException) -> None:
        if not self.failed.done():
            self.failed.set_result(error)

    def _status(self) -> dict[str, Any]:
        """What `baton status` shows of this worker. Runs on the registration's thread: it only reads."""
        stats = self.engine.stats()
        seen = stats.prompt_tokens_cached + stats.prompt_tokens_computed
        return {
            "pid": os.getpid(),
            **asdict(stats),
            "kv_usage_ratio": stats.blocks_held / max(1, stats.blocks_total),
            "prefix_hit_ratio": stats.prompt_tokens_cached / max(1, seen),
            **self.status(),
        }

    def _chain_changed(self, chain: ChainReport) -> None:
        if self._reporter is not None:
            self._reporter.report(chain.hashes, chain.held)

    async def drain(self, idle: Callable[[], bool]) -> None:
        """Takes nothing new and waits until `idle`, or the drain limit."""
        self.draining = True
        await self.server.set_serving(False)
        deadline = time.monotonic() + self.config.drain_seconds
        while not idle() and self.host.healthy() and time.monotonic() < deadline:
            await asyncio.sleep(0.02)

    async def stop(self, grace_seconds: float = 1.0) -> None:
        """Leaves the cluster first, so that nothing new comes; then ends streams, follow-ups and the engine."""
        if self._registration is not None:
            await asyncio.to_thread(self._registration.stop)
        if self._reporter is not None:
            await asyncio.to_thread(self._reporter.stop)
        await self.server.stop(grace_seconds)
        await self.follow_ups.wait(grace_seconds)
        if self._exporter is not None:
            await asyncio.to_thread(self._exporter.close)
        await self.host.stop()
        await asyncio.to_thread(self.ranks.close)


async def _nothing() -> None:
    """No role yet."""
