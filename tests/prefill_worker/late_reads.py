"""A prefill worker whose writes read their source only when the test lets them, as RDMA to a slow or stopped peer may.
Role, engine, sender and rank are real; the decode worker's side of the link is scripted by the test."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from cluster.config.worker import TransferConfig
from cluster.protocol.block_hash import pack_tokens
from engine.engine import Engine
from engine.plan import StepPlan
from kv_transfer import messages as m
from kv_transfer.prefill_side.handoff import OutgoingHandoff
from kv_transfer.prefill_side.sender import HandoffSender
from kv_transfer.prefill_side.sender_rank import SenderRank
from kv_transfer.transports.base import Arrival
from kv_transfer.transports.registry import Endpoints
from prefill_worker.attempt import PrefillAttempt
from prefill_worker.role import PrefillRole
from tests.engine.fake_model import PAGE, FakeRunner
from tests.harness.linked_router import LinkedRouter
from tests.harness.waiting import until
from tests.prefill_worker.fake_parts import fake_parts
from wire import common_pb2, handoff_pb2, prefill_pb2

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
        """Finish the write: return what the source holds now."""
        read = [piece.clone() for piece in self.pieces]
        self.state = "done"
        return read


@dataclass
class LateEndpoint:
    transport: str = "nixl"
    writes_in_place: bool = True
    name: str = "late"
    metadata: bytes = b""
    writes: list[LateWrite] = field(default_factory=list)

    def register(self, memory: Tensor) -> None: ...

    def connect(self, agent_name: str, metadata: bytes) -> None: ...

    def disconnect(self, agent_name: str) -> None: ...

    def forget(self, agent_name: str) -> None: ...

    def notify(self, agent_name: str, message: bytes) -> None: ...

    def arrivals(self) -> list[Arrival]:
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
    """Writes a token's id into every element of its KV."""

    def __init__(self) -> None:
        super().__init__(BLOCKS, max_batch_tokens=64)
        self.kv = torch.zeros(BLOCKS, 1, 2, 1, PAGE, DIM)
        self.sink: SenderRank | None = None

    def execute(self, plan: StepPlan, drawn: Tensor | None = None) -> Tensor:
        for item in plan.items:
            for position, token in enumerate(item.token_ids, item.begin):
                self.kv[item.block_ids[position // PAGE], :, :, :, position % PAGE] = float(token)
            if item.export and self.sink is not None:
                self.sink.layer_computed(item.request_id, 0, item.begin, item.end, item.block_ids)
        return super().execute(plan, drawn)


@dataclass
class Link:
    """The link to a decode worker; the test sends its replies."""

    name: str = "d@2"
    key: str = "d at 127.0.0.1:1@2"
    hello: handoff_pb2.Hello = field(
        default_factory=lambda: handoff_pb2.Hello(prefill=PREFILL, layout=LAYOUT)
    )
    agreement: handoff_pb2.Welcome = field(
        default_factory=lambda: handoff_pb2.Welcome(layout=LAYOUT, slot_bytes=SLOT_BYTES, transport="nixl")
    )
    decode: common_pb2.WorkerRef = field(default_factory=lambda: DECODE)
    lost: bool = False
    is_ready: bool = True
    said: list[tuple[str, Any]] = field(default_factory=list)

    def send(self, message: handoff_pb2.PrefillToDecode) -> None:
        kind = message.WhichOneof("message") or ""
        self.said.append((kind, getattr(message, kind)))

    def send_drained(self, transfer_id: bytes) -> None:
        self.said.append(("drained", transfer_id))

    def is_outdated(self) -> bool:
        return False

    async def ready(self) -> None: ...

    def attach(self, handoff: OutgoingHandoff) -> None: ...

    def detach(self, handoff: OutgoingHandoff) -> None: ...

    async def close(self) -> None:
        self.lost = True

    def of(self, kind: str) -> list[Any]:
        return [message for said, message in self.said if said == kind]


class World:
    """The prefill worker and its link; make it inside an event loop."""

    def __init__(self, digests: str = "off"):
        self.runner = Runner()
        self.engine = Engine(self.runner, self.runner.config, secret=b"s")
        self.endpoint = LateEndpoint()
        config = TransferConfig(
            transport="auto", slot_bytes=SLOT_BYTES, part_bytes=4096, staging_bytes=1 << 20, digests=digests
        )
        self.rank = SenderRank(
            rank=0,
            kv_cache=self.runner.kv,
            kv_head_range=(0, 1),
            endpoints=Endpoints([self.endpoint]),  # type: ignore[list-item]  # it has what a rank calls
            config=config,
        )
        self.runner.sink = self.rank
        self.sender = HandoffSender(worker=PREFILL, layout=LAYOUT, ranks=[self.rank], config=config)
        self.link = Link()
        self.sender._links[self.link.key] = self.link  # type: ignore[assignment]
        self.sender.reserve = self._reserve  # type: ignore[assignment, method-assign]  # no stream to ask over
        self.rank.handle(m.Connect(self.link.key, [m.PeerRank(0, "agent", b"")], "", "nixl"))
        parts = fake_parts(self._call, max_batch_tokens=64, page_size=PAGE)
        self.role = PrefillRole(parts, self.sender)
        self.router = LinkedRouter(self.role.routers)

    async def _call(self, function: Callable[[Engine], Any]) -> Any:
        await asyncio.sleep(0)
        return function(self.engine)

    async def _reserve(self, decode: Any, reserve: handoff_pb2.Reserve, seconds: float) -> OutgoingHandoff:
        return self.sender._begin(reserve, 0, self.link)  # type: ignore[arg-type]

    def run(self, transfer: bytes, prompt: list[int], new: int = 4) -> PrefillAttempt:
        sampling = common_pb2.SamplingParams(temperature=0.0, max_tokens=new, ignore_eos=True)
        return self.role.open(
            prefill_pb2.PrefillRunRequest(
                transfer_id=transfer,
                request_id="r",
                decode=DECODE,
                handle=self.router.handle(),
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
        """Wait until the attempt's prompt is computed and its first token sent."""
        await until(lambda: self.engine.has_work, "the engine has it")
        await self.steps()
        assert attempt.tokens

    def reply(self, attempt: PrefillAttempt, **message: Any) -> None:
        self.sender._live[attempt.transfer_id].on_reply(handoff_pb2.DecodeToPrefill(**message))

    async def grant_all(self, attempt: PrefillAttempt, parts: int) -> None:
        """Grant every part, so that all writes are posted; none has read its source yet."""
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
