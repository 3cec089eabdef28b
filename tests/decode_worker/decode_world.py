"""A decode worker without processes: its role, its receiver, its rings and its engine are the real ones; the rank's
thread, the peers' streams and the routers are moved by hand."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from cluster.background_tasks import BackgroundTasks
from cluster.config.worker import TransferConfig
from cluster.errors import BatonError, DrainingError, StaleEpochError
from cluster.faults.points import NO_FAULTS
from cluster.protocol.wire_version import WIRE_VERSION
from decode_worker.role import DecodeRole
from engine.engine import Engine
from engine.request import EngineRequest, SamplingParams, StepOutput
from engine.scheduler.sequence import Sequence
from kv_transfer import messages as m
from kv_transfer.contract import DecodeEngine
from kv_transfer.decode_side.receiver import HandoffReceiver
from kv_transfer.layout.digest import XXH3_128
from tests.engine.fake_model import PAGE, VOCAB, FakeRunner
from tests.harness.linked_router import LinkedRouter
from wire import common_pb2, handoff_pb2
from worker.validate import SpecLimits

LAYERS = 2  # of the layout: a hand-off of one part a layer
SLOT_BYTES = 4096
SLOTS = 8
SECRET = b"s"


def layout() -> common_pb2.KvLayout:
    return common_pb2.KvLayout(
        wire_version=WIRE_VERSION,
        model_id="m",
        dtype="float32",
        page_size=PAGE,
        num_layers=LAYERS,
        num_kv_heads=1,
        head_dim=1,
        tensor_parallel=1,
    )


class HandMovedRank:
    """A rank that answers when the test lets it. `writers`: slots that may still be written to."""

    is_remote = False
    staging_used_bytes = 0

    def __init__(self) -> None:
        self.on_event: Callable[[Any], None] = lambda event: None
        self.hello = m.PeerRank(0, "", b"", digest_kinds=(XXH3_128,))
        self.is_remote = False
        self.staging_used_bytes = 0
        self.expected: list[handoff_pb2.SlotGrant] = []  # every one ever, for events that come late or twice
        self.told: dict[bytes, m.ExpectTransfer] = {}  # until ForgetTransfer
        self.blocks: dict[bytes, list[int]] = {}  # of every transfer ever
        self.on_told: Callable[[m.ExpectTransfer], None] = lambda told: None
        self.writers: dict[int, bytes] = {}
        self.scatters: dict[
            int, handoff_pb2.SlotGrant
        ] = {}  # slots whose part may be on its way from there into the cache
        self.unanswered: list[bytes] = []
        self.segments = 0

    def start(self, on_event: Callable[[Any], None]) -> None:
        self.on_event = on_event

    def handle(self, message: m.ToReceiver) -> None:
        match message:
            case handoff_pb2.SlotGrant():
                assert message.slot not in self.writers, (
                    "a slot was granted while another peer may write into it"
                )
                self.writers[message.slot] = message.transfer_id
                self.scatters[message.slot] = message
                self.expected.append(message)
            case m.ExpectTransfer():
                assert message.transfer_id not in self.told, "a rank got a message twice"
                self.told[message.transfer_id] = message
                self.blocks[message.transfer_id] = list(message.block_ids)
                self.on_told(message)
            case m.ForgetTransfer(confirm=False):
                self.told.pop(message.transfer_id, None)
            case m.ForgetTransfer(transfer_id=token) | m.Settle(token=token):
                self.told.pop(token, None)
                self.unanswered.append(token)
            case m.AddSegment():
                self.segments += 1  # asked for; the memory never comes
            case _:
                pass

    def answer(self, index: int) -> None:
        token = self.unanswered.pop(index)
        for slot in [slot for slot, part in self.scatters.items() if part.transfer_id == token]:
            del self.scatters[slot]  # dropped from here on: nothing of it reaches the cache
        self.on_event(m.Confirmed(0, token))

    def close(self) -> None:
        """Nothing runs."""


class Core:
    """The parts of a worker that its role uses."""

    def __init__(self, blocks: int, overlap: bool = False) -> None:
        self.runner = FakeRunner(blocks, max_batch_tokens=64, overlap="on" if overlap else "off")
        self.engine = Engine(self.runner, self.runner.config, secret=SECRET)
        self.worker_id = "d"
        self.page_size = PAGE
        self.spec_limits = SpecLimits("m", VOCAB, 8, 8192)
        self.epoch = 1
        self.faults = NO_FAULTS
        self.tracing = None
        self.background_tasks = BackgroundTasks()
        self.identity = self.health = self.host = self
        self.config = SimpleNamespace(
            secret=SECRET.decode(),
            max_queued_requests=64,
            batch_aging_seconds=30.0,
            peer_exits="none",
            engine=SimpleNamespace(max_batch_tokens=64),
        )
        self.draining = False
        self.before_next_call: list[Callable[[], object]] = []  # while it waits for the step in progress
        self.after_next_call: list[Callable[[], object]] = []  # before its caller gets the answer

    async def call(self, function: Callable[[Engine], Any], *, behind: bool = False) -> Any:
        await asyncio.sleep(0)  # it takes a turn of the loop, in which anything may happen
        before, self.before_next_call = self.before_next_call, []
        after, self.after_next_call = self.after_next_call, []
        for happens in before:
            happens()
            await asyncio.sleep(0)
        try:
            return function(self.engine)
        finally:
            for happens in after:
                happens()

    def full(self) -> bool:
        return self.engine.full

    def beat_step(self) -> int:
        return 1

    def check_epoch(self, epoch: int) -> None:
        if epoch != self.epoch:
            raise StaleEpochError("another epoch")

    def check_accepting(self) -> None:
        if self.draining:
            raise DrainingError("draining")

    def trace_of(self, spec: common_pb2.GenerateSpec) -> None:
        """Nothing is traced."""


@dataclass(eq=False)
class Stream:
    """One prefill worker's stream, as it is written and read at the other end."""

    name: str  # worker@epoch
    queue: asyncio.Queue[handoff_pb2.PrefillToDecode | None] = field(default_factory=asyncio.Queue)
    replies: list[handoff_pb2.DecodeToPrefill] = field(default_factory=list)
    task: asyncio.Task[None] | None = None
    failure: BatonError | None = None  # the error that ended it

    @property
    def open(self) -> bool:
        return self.task is not None and not self.task.done()

    async def requests(self) -> AsyncIterator[handoff_pb2.PrefillToDecode]:
        while (message := await self.queue.get()) is not None:
            yield message

    def say(self, **message: Any) -> None:
        self.queue.put_nowait(handoff_pb2.PrefillToDecode(**message))


class DecodeWorld:
    """Made inside its loop."""

    def __init__(self, blocks: int = 24, overlap: bool = False) -> None:
        self.core = Core(blocks, overlap)
        self.rank = HandMovedRank()
        parts: Any = self.core
        self.role = DecodeRole(parts, self._make_receiver)
        self.receiver = self.role.receiver
        self.router = LinkedRouter(self.role.routers)
        self.tasks: list[asyncio.Task[Any]] = []

    def _make_receiver(
        self, parts: Any, engine: DecodeEngine, is_ended: Callable[[bytes], bool]
    ) -> HandoffReceiver:
        return HandoffReceiver(
            worker=common_pb2.WorkerRef(worker_id="d", epoch=self.core.epoch, address="d:1"),
            layout=layout(),
            ranks=[self.rank],
            addresses=[list(range(SLOTS))],
            engine=engine,
            config=TransferConfig(
                transport="grpc",
                slot_bytes=SLOT_BYTES,
                ring_bytes=1 << 16,
                ring_max_bytes=SLOTS * SLOT_BYTES,
            ),
            is_ended=is_ended,
        )

    def number_of(self, transfer_id: bytes) -> int:
        """The number of its handle."""
        return self.role.attempts._handles[transfer_id].number

    def sent(self, number: int) -> tuple[common_pb2.AttemptEnd, list[int]]:
        """The end of an attempt and the tokens before it, as its router has read them."""
        return self.router.ends[number], [token.token_id for token in self.router.tokens[number]]

    def start(self, coroutine: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        task = asyncio.get_running_loop().create_task(coroutine)
        self.tasks.append(task)
        return task

    def fill_cache(self, engine_id: str, prompt: list[int]) -> None:
        """What the parts have brought, once all of them have: behind the prefix that was there."""
        engine = self.core.engine
        held = engine.cached_tokens(engine_id)
        self.core.runner.store(engine.block_ids(engine_id), held, prompt[held:])

    def connect(self, name: str, prefill_epoch: int, decode_epoch: int) -> Stream:
        stream = Stream(f"{name}@{prefill_epoch:x}")

        async def serve() -> None:
            try:
                async for reply in self.receiver.serve(stream.requests()):
                    stream.replies += [reply, *reply.more]
            except BatonError as error:
                stream.failure = error

        stream.task = self.start(serve())
        stream.say(
            hello=handoff_pb2.Hello(
                prefill=common_pb2.WorkerRef(worker_id=name, epoch=prefill_epoch),
                decode_epoch=decode_epoch,
                layout=layout(),
                transports=["grpc"],
                digests="all",
                digest_kinds=[XXH3_128],
            )
        )
        return stream

    def evict(self) -> None:
        """As a step does that is short of blocks."""
        scheduler, evicted = self.core.engine._scheduler, list[str]()
        growing = Sequence(EngineRequest("growing", [3], SamplingParams(), priority=1), 0, [3], 0)
        if not scheduler.reservations.eviction_pending:
            victim = scheduler.reservations.evict(growing, scheduler.blocks.shares)
            evicted += [victim.request.request_id] if victim is not None else []
        self.role.on_output(StepOutput([], [], evicted))

    def step(self) -> StepOutput | None:
        if not self.core.engine.has_work:
            return None
        output = self.core.engine.step()
        self.role.on_output(output)
        return output


class Failures(logging.Handler):
    """Exceptions that were logged and are no BatonError."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.said: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if record.exc_info and not isinstance(record.exc_info[1], BatonError):
            self.said.append(f"{record.getMessage()}: {record.exc_info[1]!r}")
