"""The prefill worker's side of one hand-off, in any order: a rank's events and the peer's replies, late and repeated."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from cluster.config import TransferConfig
from cluster.errors import BatonError, PeerLostError
from kv_transfer import messages as m
from kv_transfer.base import HandoffReport, HandoffSpec
from kv_transfer.sender import HandoffSender, OutgoingHandoff
from wire import common_pb2, handoff_pb2

RANKS = 2
T = b"t" * 16
OTHER = b"x" * 16  # of a hand-off that is not, or no longer, here
REF = common_pb2.WorkerRef(worker_id="p", epoch=1, address="p:1")
LAYOUT = common_pb2.KvLayout(num_kv_heads=2, tensor_parallel=RANKS)


@dataclass
class Rank:
    """Keeps what it is told."""

    told: list[Any] = field(default_factory=list)
    on_event: Any = None
    hello = m.PeerRank(0, "", b"")

    def handle(self, message: Any) -> None:
        self.told.append(message)

    def close(self) -> None:
        """Nothing runs."""

    @property
    def closed(self) -> int:
        return sum(isinstance(message, m.CloseTransfer) for message in self.told)


@dataclass
class Link:
    """The stream to D, as a list of what was said."""

    name: str = "d@2"
    transport: str = "grpc"
    slot_bytes: int = 4096
    decode: common_pb2.WorkerRef = field(
        default_factory=lambda: common_pb2.WorkerRef(worker_id="d", epoch=2, address="127.0.0.1:1")
    )
    decode_layout: common_pb2.KvLayout = field(default_factory=lambda: LAYOUT)
    lost: bool = False
    is_ready: bool = True
    said: list[tuple[str, Any]] = field(default_factory=list)
    drained: list[bytes] = field(default_factory=list)

    def send(self, **message: Any) -> None:
        if not self.lost:
            self.said += list(message.items())

    def say_drained(self, transfer_id: bytes) -> None:
        self.drained.append(transfer_id)

    def detach(self, handoff: OutgoingHandoff) -> None:
        """It keeps no list."""


class SenderMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.first_word = ""  # of D, or of our own ranks, on how it ends
        self.opened_ranks: set[int] = set()
        self.drained_ranks: set[int] = set()
        self.finishing: asyncio.Task[HandoffReport] | None = None
        self.aborted = False

    @initialize(know=st.sampled_from([RANKS, RANKS, RANKS, 0]))
    def build(self, know: int) -> None:
        """So many ranks know of the hand-off at once."""

        async def make() -> HandoffSender:
            return HandoffSender(
                worker=REF, layout=LAYOUT, ranks=self.ranks, config=TransferConfig(transport="grpc")
            )

        self.ranks = [Rank() for _ in range(RANKS)]
        self.link = Link()
        self.sender = self.loop.run_until_complete(make())
        self.sender._links[self.link.name] = self.link  # type: ignore[assignment]
        spec = HandoffSpec(T, "r", common_pb2.GenerateSpec(n=1), 16)
        self.handoff = self.inside(lambda: OutgoingHandoff(self.sender, self.link, spec, 0))  # type: ignore[arg-type]
        self.sender._live[T] = self.handoff
        self.starting = self.inside(lambda: self.loop.create_task(self.handoff.start("r")))
        for rank in range(know):
            self.opened(rank)

    def inside(self, function: Any) -> Any:
        """Calls it on the loop and lets follow-ups run."""

        async def call() -> Any:
            result = function()
            for _ in range(6):
                await asyncio.sleep(0)
            return result

        return self.loop.run_until_complete(call())

    # --- ranks -------------------------------------------------------------------------------------------

    def rank_says(self, rank: int, event: Any) -> None:
        self.inside(lambda: self.ranks[rank].on_event(event))

    @rule(rank=st.integers(0, RANKS - 1))
    def opened(self, rank: int) -> None:
        self.opened_ranks.add(rank)
        self.rank_says(rank, m.TransferOpened(T, rank))

    @rule(rank=st.integers(0, RANKS - 1), transfer=st.sampled_from([T, T, OTHER]))
    def gathered(self, rank: int, transfer: bytes) -> None:
        self.rank_says(rank, m.AllGathered(transfer, rank, ((rank, 3),), 100))

    @rule(rank=st.integers(0, RANKS - 1), part=st.integers(0, 3))
    def wants_slot(self, rank: int, part: int) -> None:
        self.rank_says(rank, m.SlotWanted(T, rank, rank, part, 64))

    @rule(rank=st.integers(0, RANKS - 1))
    def fails(self, rank: int) -> None:
        self.note("failed")
        self.rank_says(rank, m.TransferFailed(T, "the write failed"))

    @rule(rank=st.integers(0, RANKS - 1))
    def drains(self, rank: int) -> None:
        """A rank says so only after it was told to close; perhaps twice."""
        if self.ranks[rank].closed:
            self.drained_ranks.add(rank)
            self.rank_says(rank, m.TransferDrained(T, rank))

    # --- D -----------------------------------------------------------------------------------------------

    def reply(self, **message: Any) -> None:
        self.inside(lambda: self.handoff.on_reply(handoff_pb2.DecodeToPrefill(**message)))

    @rule(rank=st.integers(0, RANKS - 1), part=st.integers(0, 3))
    def grants(self, rank: int, part: int) -> None:
        grant = handoff_pb2.SlotGrant(transfer_id=T, source_rank=rank, target_rank=rank, part=part, slot=1)
        self.reply(slot_grant=grant)

    @rule(rank=st.integers(0, RANKS - 1), verified=st.booleans())
    def answers_part(self, rank: int, verified: bool) -> None:
        self.reply(part_result=handoff_pb2.PartResult(transfer_id=T, source_rank=rank, verified=verified))

    @rule()
    def commits(self) -> None:
        """D commits only what it was told the end of."""
        if any(kind == "finish" for kind, _ in self.link.said):
            self.note("committed")
            self.reply(committed=handoff_pb2.Committed(transfer_id=T))

    @rule()
    def aborts(self) -> None:
        self.note("failed")
        self.reply(aborted=handoff_pb2.Aborted(transfer_id=T, error=PeerLostError("gone").to_wire()))

    @rule()
    def stream_breaks(self) -> None:
        self.note("failed")
        self.link.lost = True
        self.inside(lambda: self.handoff.fail(PeerLostError("broken")))

    def note(self, word: str) -> None:
        self.first_word = self.first_word or word

    # --- the worker --------------------------------------------------------------------------------------

    @rule()
    def finish(self) -> None:
        if self.finishing is None and not self.aborted:

            async def compute_and_finish() -> HandoffReport:
                await self.starting
                tokens = [common_pb2.Token(position=16, token_id=5)]
                return await self.handoff.finish(tokens, common_pb2.WorkReport())

            self.finishing = self.inside(lambda: self.loop.create_task(compute_and_finish()))

    @rule()
    def give_up(self) -> None:
        if self.finishing is not None and self.finishing.done():
            self.finishing.exception()
        elif self.finishing is not None:
            return  # whoever finishes is cancelled first
        self.aborted = True
        self.loop.run_until_complete(self.handoff.abort("no more"))

    # --- what always holds -------------------------------------------------------------------------------

    @invariant()
    def consistent(self) -> None:
        if not hasattr(self, "handoff"):
            return
        kinds = [kind for kind, _ in self.link.said]
        assert kinds.count("finish") <= 1
        if self.starting.done() and self.starting.exception() is None:
            assert self.opened_ranks == set(range(RANKS)), "computed before every rank looks out for layers"
        else:
            assert self.starting.done() == (self.first_word == "failed")
        assert len({rank.closed for rank in self.ranks}) == 1
        assert self.ranks[0].closed <= 1, "closed twice"
        if self.finishing is not None and self.finishing.done():
            failed = self.finishing.exception() is not None
            assert failed == (self.first_word == "failed"), "the first word counts"
            assert isinstance(self.finishing.exception(), BatonError | None)
            assert failed or self.ranks[0].closed == 1
        drained = self.link.drained.count(T) + sum(
            waiting.count(T) for waiting in self.sender.mail._waiting.values()
        )
        assert drained == (self.drained_ranks == set(range(RANKS))), (
            "Drained is said once, when all ranks are"
        )
        assert (self.sender.live == 0) == bool(drained)

    def teardown(self) -> None:
        async def end() -> None:
            tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

        self.loop.run_until_complete(end())
        self.loop.close()


SenderMachine.TestCase.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)
TestSender = SenderMachine.TestCase
