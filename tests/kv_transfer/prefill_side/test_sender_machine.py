"""The prefill worker's side of one hand-off, in any order: a rank's events and the peer's replies, late and repeated."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from cluster.config.worker import TransferConfig
from cluster.errors import BatonError, PeerLostError, TransportError
from kv_transfer import messages as m
from kv_transfer.contract import HandoffReport
from kv_transfer.prefill_side.handoff import MAX_REQUESTS, OutgoingHandoff
from kv_transfer.prefill_side.sender import HandoffSender
from tests.harness.reached import Reached
from wire import common_pb2, handoff_pb2

REACHED = Reached(
    [
        *("opened late", "opened at once", "slot asked for", "granted", "verified", "sent again"),
        *("senseless grant", "senseless result", "rank failed", "aborted by decode", "stream broken"),
        *("committed", "finish failed", "given up", "drained", "drained without a stream", "fenced"),
        *("acknowledged", "opened under a later epoch", "found corrupted twice"),
    ]
)
RANKS = 2
T = b"t" * 16
OTHER = b"x" * 16  # of a hand-off that is not, or no longer, here
EPOCH = 1
REF = common_pb2.WorkerRef(worker_id="p", epoch=EPOCH, address="p:1")
LAYOUT = common_pb2.KvLayout(num_kv_heads=2, tensor_parallel=RANKS)
DECODE = "d at 127.0.0.1:1"  # by `worker_key`


@dataclass
class Rank:
    """Records its messages."""

    told: list[Any] = field(default_factory=list)
    on_event: Any = None
    hello = m.PeerRank(0, "", b"")
    is_remote = True
    staging_used_bytes = 0

    def start(self, on_event: Any) -> None:
        self.on_event = on_event

    def handle(self, message: Any) -> None:
        self.told.append(message)

    def close(self) -> None:
        """Nothing runs."""

    @property
    def granted(self) -> int:
        return sum(isinstance(message, handoff_pb2.SlotGrant) for message in self.told)

    @property
    def closed(self) -> int:
        return sum(isinstance(message, m.CloseTransfer) for message in self.told)


@dataclass
class Link:
    """The stream to D, as a list of sent messages."""

    name: str = "d@2"
    key: str = "d at 127.0.0.1:1@2"
    hello: handoff_pb2.Hello = field(default_factory=lambda: handoff_pb2.Hello(prefill=REF, layout=LAYOUT))
    agreement: handoff_pb2.Welcome = field(
        default_factory=lambda: handoff_pb2.Welcome(
            layout=LAYOUT, slot_bytes=4096, transport="grpc", digests="all", digest_kind="xxh3_128"
        )
    )
    decode: common_pb2.WorkerRef = field(
        default_factory=lambda: common_pb2.WorkerRef(worker_id="d", epoch=2, address="127.0.0.1:1")
    )
    lost: bool = False
    is_ready: bool = True
    said: list[tuple[str, Any]] = field(default_factory=list)
    drained: list[bytes] = field(default_factory=list)

    def is_outdated(self) -> bool:
        return False

    async def ready(self) -> None:
        if self.lost:
            raise PeerLostError("lost")

    async def close(self) -> None:
        self.lost = True

    def send(self, message: handoff_pb2.PrefillToDecode) -> None:
        kind = message.WhichOneof("message")
        if not self.lost and kind is not None:
            self.said.append((kind, getattr(message, kind)))

    def send_drained(self, transfer_id: bytes) -> None:
        self.drained.append(transfer_id)

    def attach(self, handoff: OutgoingHandoff) -> None:
        """It keeps no list."""

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
        self.calm = False
        self.fenced = False
        self.broken_before_drained = False
        self.acknowledged = False
        self.asked: dict[tuple[int, int], int] = {}  # slots, by rank and part

    @initialize(
        know=st.sampled_from([RANKS, RANKS, RANKS, 0]),
        epoch=st.sampled_from([EPOCH, EPOCH, EPOCH + 1]),
        calm=st.booleans(),
        finishing=st.booleans(),
        computed=st.booleans(),
        fenced=st.sampled_from([False, False, False, True]),
    )
    def build(self, know: int, epoch: int, calm: bool, finishing: bool, computed: bool, fenced: bool) -> None:
        """`know` ranks open the hand-off at once; the decode worker has `epoch` at the start. `calm`: nothing fails, since
        otherwise hardly any hand-off would reach its commit. `finishing`: from the start, since which rules a run draws
        depends on the modules that are loaded, and it may never draw `finish`.
        `computed`: all ranks have gathered everything, and `fenced`: at once, for the same reason."""
        self.calm = calm and not fenced

        async def make() -> HandoffSender:
            return HandoffSender(
                worker=REF, layout=LAYOUT, ranks=self.ranks, config=TransferConfig(transport="grpc")
            )

        self.ranks = [Rank() for _ in range(RANKS)]
        self.link = Link()
        self.sender = self.loop.run_until_complete(make())
        self.sender._links[self.link.key] = self.link  # type: ignore[assignment]
        reserve = handoff_pb2.Reserve(
            transfer_id=T, request_id="r", spec=common_pb2.GenerateSpec(n=1), token_count=16
        )
        self.link.hello.prefill.epoch = epoch  # the worker had rejoined before it opened the link
        self.epoch = epoch
        self.handoff = self.inside(lambda: self.sender._begin(reserve, 0, self.link))  # type: ignore[arg-type]
        self.starting = self.inside(lambda: self.loop.create_task(self.handoff.start("r")))
        for rank in range(know):
            self.opened(rank)
        REACHED.hit("opened at once" if know else "opened late")
        for rank_ in self.ranks:
            (opened,) = rank_.told
            assert isinstance(opened, m.OpenTransfer)
            assert (opened.prefill_epoch, opened.decode_epoch) == (epoch, 2), "parts would be taken as stale"
            assert (opened.digests, opened.digest_kind) == ("all", "xxh3_128")
            if opened.prefill_epoch != EPOCH:
                REACHED.hit("opened under a later epoch")
        if computed:
            for rank in range(RANKS):
                self.gathered(rank, T)
        if fenced:
            self.is_fenced()
        elif finishing:
            self.finish()

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
        """The third time, D has found the part corrupted twice."""
        asked = self.asked.get((rank, part), 0) + 1
        if asked > MAX_REQUESTS:
            if self.calm:
                return
            self.note("failed")
            REACHED.hit("found corrupted twice")
        self.asked[rank, part] = asked
        self.rank_says(
            rank,
            handoff_pb2.SlotRequest(transfer_id=T, source_rank=rank, target_rank=rank, part=part, bytes=64),
        )
        REACHED.hit("slot asked for")

    @precondition(lambda self: not self.calm)
    @rule(rank=st.integers(0, RANKS - 1))
    def fails(self, rank: int) -> None:
        self.note("failed")
        REACHED.hit("rank failed")
        self.rank_says(rank, m.TransferFailed(T, "the write failed"))

    @precondition(lambda self: self.ranks[0].closed)
    @rule(ranks=st.sampled_from([(0,), (1,), (0, 1), (1, 0)]))
    def drains(self, ranks: tuple[int, ...]) -> None:
        """A rank reports it only after CloseTransfer; perhaps twice."""
        for rank in ranks:
            self.drained_ranks.add(rank)
            self.broken_before_drained |= self.link.lost and self.sender.live > 0
            self.rank_says(rank, m.TransferDrained(T, rank))

    @precondition(lambda self: self.sender.notices.waits_for(DECODE) and not self.link.lost)
    @rule(transfer=st.sampled_from([T, OTHER]))
    def acknowledges(self, transfer: bytes) -> None:
        self.inside(lambda: self.sender.notices.acknowledged(DECODE, transfer))
        assert self.sender.notices.waits_for(DECODE) == (transfer != T), "something else was acknowledged"
        self.acknowledged = transfer == T
        REACHED.hit("acknowledged")

    # --- D -----------------------------------------------------------------------------------------------

    def reply(self, **message: Any) -> None:
        self.inside(lambda: self.handoff.on_reply(handoff_pb2.DecodeToPrefill(**message)))

    @rule(rank=st.integers(0, RANKS - 1), part=st.integers(0, 3))
    def grants(self, rank: int, part: int) -> None:
        grant = handoff_pb2.SlotGrant(transfer_id=T, source_rank=rank, target_rank=rank, part=part, slot=1)
        before = self.ranks[rank].granted
        self.reply(slot_grant=grant)
        assert self.ranks[rank].granted == before + 1
        REACHED.hit("granted")

    @rule(rank=st.integers(0, RANKS - 1), verified=st.booleans())
    def answers_part(self, rank: int, verified: bool) -> None:
        self.reply(part_result=handoff_pb2.PartResult(transfer_id=T, source_rank=rank, verified=verified))
        REACHED.hit("verified" if verified else "sent again")

    @precondition(lambda self: not self.calm)
    @rule(kind=st.sampled_from(["slot_grant", "part_result"]), source=st.booleans())
    def names_a_rank_that_does_not_exist(self, kind: str, source: bool) -> None:
        """An invalid reply ends the hand-off and is not passed to a rank."""
        granted = [rank.granted for rank in self.ranks]
        ranks: dict[str, Any] = {"source_rank": RANKS} if source else {"target_rank": RANKS}
        message = handoff_pb2.SlotGrant if kind == "slot_grant" else handoff_pb2.PartResult
        self.note("failed")
        self.reply(**{kind: message(transfer_id=T, **ranks)})
        assert granted == [rank.granted for rank in self.ranks]
        REACHED.hit("senseless grant" if kind == "slot_grant" else "senseless result")

    @precondition(lambda self: any(kind == "finish" for kind, _ in self.link.said))
    @rule()
    def commits(self) -> None:
        """D commits only hand-offs whose Finish it has."""
        self.note("committed")
        self.reply(committed=handoff_pb2.Committed(transfer_id=T))

    @precondition(lambda self: not self.calm)
    @rule()
    def aborts(self) -> None:
        self.note("failed")
        REACHED.hit("aborted by decode")
        self.reply(aborted=handoff_pb2.Aborted(transfer_id=T, error=PeerLostError("gone").to_wire()))

    @precondition(lambda self: not self.calm)
    @rule()
    def stream_breaks(self) -> None:
        self.note("failed")
        REACHED.hit("stream broken")
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
            return  # one that finishes is cancelled first
        self.aborted = True
        REACHED.hit("given up")
        self.loop.run_until_complete(self.handoff.abort("no more"))

    @precondition(lambda self: not (self.calm or self.fenced) and self.finishing is None)
    @rule()
    def is_fenced(self) -> None:
        """Rejoin: hand-offs of the old epoch end, and streams are opened again."""
        self.fenced = self.aborted = True
        self.note("failed")
        worker = common_pb2.WorkerRef(worker_id="p", epoch=self.epoch + 1, address="p:1")
        self.loop.run_until_complete(self.sender.rejoin(worker))
        self.inside(lambda: self.handoff.fail(PeerLostError("the stream was closed")))  # as a link does
        assert self.link.lost
        assert self.ranks[0].closed == 1, "parts go on under an epoch that is over"
        REACHED.hit("fenced")

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
            REACHED.hit("finish failed" if failed else "committed")
            assert not isinstance(self.finishing.exception(), TransportError) or failed
        self.is_drained_when_all_ranks_are()

    def is_drained_when_all_ranks_are(self) -> None:
        everywhere = self.drained_ranks == set(range(RANKS))
        kept = T in self.sender.notices._waiting.get(DECODE, {})
        assert kept == (everywhere and not self.acknowledged), "Drained is kept until it is acknowledged"
        assert everywhere or not self.link.drained, "said before every handle is terminal"
        assert (self.sender.live == 0) == everywhere
        assert self.handoff._drained.all_here.done() == everywhere, (
            "its blocks would be given back too early, or never"
        )
        if everywhere:
            assert self.link.drained or self.broken_before_drained, "not said on a stream that lives"
            REACHED.hit("drained without a stream" if self.broken_before_drained else "drained")

    def teardown(self) -> None:
        async def end() -> None:
            tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

        self.loop.run_until_complete(end())
        self.loop.close()


SenderMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)


class TestSender(SenderMachine.TestCase):  # type: ignore[valid-type, misc]  # made by Hypothesis
    @classmethod
    def tearDownClass(cls) -> None:
        super().tearDownClass()
        REACHED.check()
