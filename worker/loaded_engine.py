"""The engine of a worker: its ranks, its thread, and the watch over both."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from cluster.config.worker import EngineConfig, WorkerConfig
from cluster.errors import DeadlineError, ModelError
from cluster.index.reporter import Chain
from cluster.protocol.times import LOST_SECONDS
from engine.engine import Engine
from engine.request import ChainReport, StepOutput
from worker.ending import Ending
from worker.engine_host import EngineHost
from worker.health import Health, Phase
from worker.ranks.ranks import open_ranks


class LoadedEngine:
    """Life: construct (the model is loaded and warmed up) → `start` → `stop`."""

    def __init__(
        self,
        config: WorkerConfig,
        epoch: int,
        health: Health,
        ending: Ending,
        *,
        on_output: Callable[[StepOutput], None],
        on_chain: Callable[[ChainReport], None],
    ):
        """`on_output` runs on the loop, `on_chain` on the engine's thread. Raises ModelError, ConfigError, SetupError."""
        self._stall_seconds = config.step_stall_seconds
        self._ending = ending
        self.ranks = open_ranks(config, epoch, ending, health.describe)
        health.to(Phase.WARMING_UP)
        self.ranks.warm_up(health.describe)
        runner = self.ranks.runner
        self.engine = Engine(
            runner, runner.config, secret=config.secret.encode(), on_chain=on_chain, draft=self.ranks.draft
        )
        self.adapters = self._load_adapters(config.engine, health)
        self.host = EngineHost(
            self.engine,
            config.worker_id,
            on_output=on_output,
            on_failure=ending.engine_failed,
            step_stall_seconds=config.step_stall_seconds,
            ranks_answer=self.ranks.watch.healthy,
            use_thread=runner.use_thread,
        )
        self._watching: asyncio.Task[None] | None = None

    def _load_adapters(self, config: EngineConfig, health: Health) -> tuple[tuple[str, str], ...]:
        """Load those of the settings; returns (name, digest) of each. Raises ModelError naming the adapter, and SetupError
        if a rank is lost."""
        loaded = []
        for name, directory in config.adapter_directories.items():
            health.describe(f"adapter {name} is read")
            try:
                with self.ranks.starting(f"reading adapter {name}"):
                    digest = self.engine.adapters.load(directory)
            except (ModelError, DeadlineError) as error:
                raise ModelError(f"--lora {name}={directory}: {error.message}", field="lora") from error
            loaded.append((name, digest))
        return tuple(loaded)

    def start(self) -> None:
        self.host.start()
        self._watching = asyncio.get_running_loop().create_task(
            self.ranks.watch.run(self._ending.engine_failed, self._stall_seconds)
        )

    def responds(self) -> bool:
        """Whether beats and lease renewals are sent. Any thread."""
        return self.host.healthy() and self.ranks.watch.prompt()

    def beat_step(self) -> int | None:
        """The step counter of a beat; None while the engine or a rank hangs, so that beats stop."""
        return self.host.steps if self.responds() else None

    async def held_chains(self) -> list[Chain]:
        """The whole prefix cache, read on the engine's thread."""
        return await self.host.call(
            lambda engine: [(chain.hashes, chain.held) for chain in engine.held_chains()]
        )

    async def end_silent_ranks(self) -> None:
        """Kill silent ranks, for which the engine's thread would wait in a collective operation."""
        await asyncio.to_thread(self.ranks.watch.kill_silent, LOST_SECONDS)

    async def stop(self) -> None:
        if self._watching is not None:
            self._watching.cancel()
        await self.end_silent_ranks()
        await self.host.stop()
        await asyncio.to_thread(self.ranks.close, between_steps=self.host.ended_well)
