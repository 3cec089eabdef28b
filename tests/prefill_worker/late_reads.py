"""A prefill worker whose writes read their source only when the test says so, as RDMA over a slow or stopped peer does:
the product's role, engine, sender and sending rank, and a link to a decode worker that the test speaks for."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from cluster.block_hash import pack_tokens
from cluster.config import TransferConfig
from cluster.faults.points import NO_FAULTS
from engine.engine import Engine
from engine.plan import StepPlan
from kv_transfer import messages as m
from kv_transfer.base import HandoffSpec
from kv_transfer.sender import HandoffSender, OutgoingHandoff
from kv_transfer.sender_rank import SenderRank
from prefill_worker.attempt import PrefillAttempt
from prefill_worker.role import PrefillRole
from tests.engine.fake_model import PAGE, VOCAB, FakeRunner
from tests.waiting import until
from wire import common_pb2, handoff_pb2, prefill_pb2
from worker.validate import SpecLimits

BLOCKS, DIM = 12, 4096  # one block of one head is long enough to be written from where it lies
SLOT_BYTES = 2 * PAGE * DIM * 4
LAYOUT = common_pb2.KvLayout(num_kv_heads=1, tensor_parallel=1)
DECODE = common_pb2.WorkerRef(worker_id="d", epoch=2, address="127.0.0.1:1")
PREFILL = common_pb2.WorkerRef(worker_id="p", epoch=1, address="127.0.0.1:2")


@dataclass
class LateWrite:
    pieces: list[Tensor]
    state: str = "pending"

    def poll(self) -> str:
        return self.state

    def read(self) -> list[Tensor]:
        """What is in the source now, and with that the write is over."""
        read = [piece.clone() for piece in self.pieces]
        self.state = "done"
        return read


@dataclass
class LateEndpoint:
    name: str = "late"
    metadata: bytes = b""
    writes: list[LateWrite] = field(default_factory=list)

    def register(self, memory: Tensor) -> None: ...

    def connect(self, agent_name: str, metadata: bytes) -> None: ...

    def disconnect(self, agent_name: str) -> None: ...

    def forget(self, agent_name: str) -> None: ...

    def notify(self, agent_name: str, message: bytes) -> None: ...

    def notifications(self) -> list[bytes]:
        return []

    def write(
        self,
        agent_name: str,
        pieces: list[Tensor],
        address: int,
        device: int,
        notification: bytes,
        memory: str = "DRAM",
    ) -> LateWrite:
        self.writes.append(LateWrite(pieces))
        return self.writes[-1]

    def close(self) -> None: ...


class Runner(FakeRunner):
    """Leaves a token's id in every element of its KV."""

    def __init__(self) -> None:
        super().__init__(BLOCKS, max_batch_tokens=64)
        self.kv = torch.zeros(BLOCKS, 1, 2, 1, PAGE, DIM)
        self.sink: SenderRank | None = None

    def execute(self, plan: StepPlan) -> Tensor:
        for item in plan.items:
            for position, token in enumerate(item.token_ids, item.begin):
                self.kv[item.block_ids[position // PAGE], :, :, :, position % PAGE] = float(token)
            if item.export and self.sink is not None:
                self.sink.layer_computed(item.request_id, 0, item.begin, item.end, item.block_ids)
        return super().execute(plan)


@dataclass
class Link:
    """D, which says only what the test says."""

    name: str = "d@2"
    transport: str = "nixl"
    slot_bytes: int = SLOT_BYTES
    digests: str = ""
    digest_kind: str = ""
    decode: common_pb2.WorkerRef = field(default_factory=lambda: DECODE)
    decode_layout: common_pb2.KvLayout = field(default_factory=lambda: LAYOUT)
    lost: bool = False
    is_ready: bool = True
    said: list[tuple[str, Any]] = field(default_factory=list)

    def send(self, **message: Any) -> None:
        self.said += list(message.items())

    def say_drained(self, transfer_id: bytes) -> None:
        self.said.append(("drained", transfer_id))

    async def ready(self) -> None: ...

    def attach(self, handoff: OutgoingHandoff) -> None: ...

    def detach(self, handoff: OutgoingHandoff) -> None: ...

    async def close(self) -> None:
        self.lost = True

    def of(self, kind: str) -> list[Any]:
        return [message for said, message in self.said if said == kind]


class World:
    """Made inside its loop."""

    def __init__(self, digests: str = "off"):
        self.runner = Runner()
        self.engine = Engine(self.runner, self.runner.config, secret=b"s")
        self.endpoint = LateEndpoint()
        config = TransferConfig(
            transport="auto", slot_bytes=SLOT_BYTES, part_bytes=4096, staging_bytes=1 << 20, digests=digests
        )
        self.rank = SenderRank(
            rank=0, kv_cache=self.runner.kv, kv_head_range=(0, 1), endpoint=self.endpoint, config=config
        )
        self.runner.sink = self.rank
        self.sender = HandoffSender(worker=PREFILL, layout=LAYOUT, ranks=[self.rank], config=config)
        self.link = Link()
        self.sender._links[self.link.name] = self.link  # type: ignore[assignment]
        self.sender.reserve = self._reserve  # type: ignore[method-assign]
        self.rank.handle(m.Connect(self.link.name, [m.PeerRank(0, "agent", b"")], ""))
        core = SimpleNamespace(
            config=SimpleNamespace(
                engine=SimpleNamespace(max_batch_tokens=64),
                batch_aging_seconds=30.0,
                max_queued_requests=32,
                secret="s",
            ),
            faults=NO_FAULTS,
            tracing=None,
            trace_of=lambda spec: None,
            beat_step=lambda: 1,
            check_wire_version=lambda version: None,
            check_epoch=lambda epoch: None,
            check_accepting=lambda: None,
            host=SimpleNamespace(call=self._call),
            page_size=PAGE,
            worker_id="p",
            spec_limits=SpecLimits("m", VOCAB, 8),
        )
        self.role = PrefillRole(core, self.sender)  # type: ignore[arg-type]

    async def _call(self, function: Callable[[Engine], Any]) -> Any:
        await asyncio.sleep(0)
        return function(self.engine)

    async def _reserve(self, decode: Any, spec: HandoffSpec, seconds: float) -> OutgoingHandoff:
        handoff = OutgoingHandoff(self.sender, self.link, spec, 0)  # type: ignore[arg-type]
        self.sender._live[spec.transfer_id] = handoff
        return handoff

    def run(self, transfer: bytes, prompt: list[int], new: int = 4) -> PrefillAttempt:
        sampling = common_pb2.SamplingParams(temperature=0.0, max_tokens=new, ignore_eos=True)
        return self.role.open(
            prefill_pb2.PrefillRunRequest(
                transfer_id=transfer,
                request_id="r",
                decode=DECODE,
                spec=common_pb2.GenerateSpec(
                    model_id="m", prompt_tokens=pack_tokens(prompt), sampling=sampling, n=1, salt=bytes(16)
                ),
            )
        )

    async def steps(self, count: int = 1) -> None:
        for _ in range(count):
            if self.engine.has_work:
                self.role.on_output(self.engine.step())
            for _ in range(10):
                await asyncio.sleep(0)

    async def computed(self, attempt: PrefillAttempt) -> None:
        """Its prompt, and its first token is out."""
        await until(lambda: self.engine.has_work, "the engine has it")
        await self.steps()
        assert attempt.tokens

    def reply(self, attempt: PrefillAttempt, **message: Any) -> None:
        self.sender._live[attempt.transfer_id].on_reply(handoff_pb2.DecodeToPrefill(**message))

    async def grant_all(self, attempt: PrefillAttempt, parts: int) -> None:
        """All of its writes are posted; none has read its source."""
        before = len(self.endpoint.writes)
        await until(lambda: len(self.link.of("slot_request")) >= parts, "slots asked for")
        for part in range(parts):
            grant = handoff_pb2.SlotGrant(
                transfer_id=attempt.transfer_id, part=part, slot=part, generation=1, address=4096
            )
            self.reply(attempt, slot_grant=grant)
        await until(lambda: len(self.endpoint.writes) == before + parts, "posted")

    async def close(self) -> None:
        for write in self.endpoint.writes:
            write.state = "done"
        for attempt in self.role.attempts.all():
            await self.role.cancel(attempt)
        deadline = time.monotonic() + 10
        while self.sender.live and time.monotonic() < deadline:
            await asyncio.sleep(0.005)
        await self.role.attempts.close()
        await self.sender.close()
