"""Prompts that a decode worker computes by itself, with steps taken by hand."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

from cluster.background_tasks import BackgroundTasks
from cluster.config.worker import EngineConfig, WorkerConfig
from cluster.faults.points import NO_FAULTS
from cluster.grammar.spec import GrammarSpec
from cluster.protocol.block_hash import pack_tokens
from decode_worker.role import DecodeRole
from engine.engine import Engine
from kv_transfer.contract import HandoffState
from tests.engine.fake_model import VOCAB, FakeRunner
from tests.harness.linked_router import LinkedRouter
from wire import common_pb2, decode_pb2
from worker.validate import SpecLimits

T = TypeVar("T")
PROMPT = 16  # tokens; two of them fill the bound, which is two steps
BUDGET = 16


class Core:
    """The parts of a worker around a real scheduler over a made-up model; steps are taken by hand."""

    def __init__(self, blocks: int = 400, **settings: Any):
        runner = FakeRunner(blocks, max_batch_tokens=BUDGET, **settings)
        self.engine = Engine(runner, runner.config, secret=b"s")
        self.config = WorkerConfig(
            role="decode", engine=EngineConfig(model=Path("/m"), max_batch_tokens=BUDGET)
        )
        self.worker_id = "d"
        self.spec_limits = SpecLimits("m", VOCAB, 8, 8192)
        self.faults = NO_FAULTS
        self.tracing = None
        self.identity = self.health = self.host = self
        self.background_tasks = BackgroundTasks()
        self.compiled_already: set[str] = set()  # texts of grammars

    async def call(self, function: Callable[[Engine], T], *, behind: bool = False) -> T:
        await asyncio.sleep(0)
        return function(self.engine)

    def check_epoch(self, epoch: int) -> None: ...

    def check_accepting(self) -> None: ...

    def has_grammar(self, grammar: GrammarSpec, tenant: str) -> bool:
        return grammar.text in self.compiled_already

    def full(self) -> bool:
        return self.engine.full

    def beat_step(self) -> int:
        return 1

    def trace_of(self, spec: common_pb2.GenerateSpec) -> None:
        """Nothing is traced here."""


class Local:
    """Requests to a role, and the order of their first tokens and ends."""

    def __init__(self, blocks: int = 400, **settings: Any) -> None:
        self.core = Core(blocks, **settings)

        async def abort(transfer_id: bytes, reason: object = None) -> HandoffState:
            return HandoffState.ABORTED

        receiver: Any = SimpleNamespace(abort=abort)
        parts: Any = self.core
        self.role = DecodeRole(parts, lambda *_: receiver)
        self.router = LinkedRouter(self.role.routers)
        self.first: list[str] = []
        self.outcomes: dict[str, common_pb2.AttemptEnd] = {}
        self._names: dict[int, str] = {}  # by handle

    def ask(
        self,
        name: str,
        tenant: str = "",
        weight: float = 1.0,
        priority: int = 0,
        deadline_ms: int = 60_000,
        new: int = 2,
        tokens: int = PROMPT,
        grammar: str = "",
    ) -> bytes:
        number = len(self._names)
        spec = common_pb2.GenerateSpec(
            prompt_tokens=pack_tokens([3 + number % 90, 3 + number // 90] * (tokens // 2)),
            sampling=common_pb2.SamplingParams(max_tokens=new, ignore_eos=True),
            salt=bytes(16),
            tenant=tenant,
            weight=weight,
            priority=priority,
            grammar=common_pb2.Grammar(regex=grammar) if grammar else None,
        )
        transfer_id = number.to_bytes(16, "big")
        handle = self.router.handle()
        self._names[handle.number] = name
        self.role.run(
            decode_pb2.DecodeRunRequest(
                transfer_id=transfer_id, spec=spec, admission_deadline_ms=deadline_ms, handle=handle
            )
        )
        return transfer_id

    async def settle(self) -> None:
        for _ in range(20):
            await asyncio.sleep(0)
        for number, name in self._names.items():
            if self.router.tokens[number] and name not in self.first:
                self.first.append(name)
            if number in self.router.ends:
                self.outcomes[name] = self.router.ends[number]

    async def step(self) -> None:
        await self.settle()
        if self.core.engine.has_work:
            self.role.on_output(self.core.engine.step())
            self.role.attempts.admission.check_integrity()
        await self.settle()

    async def run(self) -> None:
        for _ in range(500):
            if len(self.outcomes) == len(self._names):
                return
            await self.step()
        raise AssertionError(f"{len(self.outcomes)} of {len(self._names)} have ended")

    def check_nothing_is_left(self) -> None:
        assert self.role.attempts.admission.inside_tokens == 0 and self.role.attempts.admission.waiting == 0
        assert not self.role.attempts.by_engine_id and not len(self.role.attempts)
        self.core.engine.check_integrity()
        assert self.core.engine.stats().blocks_held == 0
