"""Attempts, their logs and the links of one router process, on virtual time: frames wait as long as they like, links
break in the middle of what was sent, a newer one overtakes an older one, credit is lost, repeated and late.

The router of this test keeps one promise of the protocol: it takes exactly the next position of each choice.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from cluster.errors import BatonError, OverloadedError, StaleTransferError
from cluster.link.framing import FrameReader, to_frame
from cluster.protocol.link import LINK_VERSION, MIN_LINK_VERSION, window_of
from tests.harness.virtual_time import VirtualLoop
from wire import common_pb2, link_pb2
from worker.attempt_log import AttemptLog
from worker.attempts import Attempts
from worker.link.session import Session, State

INCARNATION = 77
MAX_ATTEMPTS = 4
DETACH_SECONDS = 1.5
AFTER_PAUSE = 3  # tokens of steps that run when a request is paused
NUMBERS = st.integers(1, 6)


@dataclass(eq=False)
class Attempt:
    transfer_id: bytes
    log: AttemptLog
    choices: int


@dataclass(eq=False)
class Reading:
    """The router's side of one attempt."""

    number: int
    choices: int
    tokens: list[list[int]] = field(default_factory=list)
    granted: list[int] = field(default_factory=list)
    ended: bool = False
    lost: bool = False
    cancelled: bool = False

    def __post_init__(self) -> None:
        self.tokens = [[] for _ in range(self.choices)]
        self.granted = [window_of(self.choices)] * self.choices

    @property
    def transfer_id(self) -> bytes:
        return self.number.to_bytes(16, "big")

    @property
    def open(self) -> bool:
        return not (self.ended or self.lost or self.cancelled)


class Link:
    """One connection: bytes wait on either side until a rule delivers them. Implements
    worker.link.session.FrameTransport."""

    def __init__(self, machine: LinkMachine, serial: int):
        self._machine = machine
        self._scheduled = False
        self.down: deque[bytes] = deque()  # frames on the way to the router
        self.up: deque[bytes] = deque()
        self.closed = False  # by the worker
        self.cut = False
        self.frames = FrameReader()
        self.session = Session(machine.attempts.routers, machine, self, lambda: 1)
        self.serial = serial

    def write(self, frame: bytes) -> None:
        self.down.append(frame)

    def close(self) -> None:
        self.closed = True

    def schedule(self) -> None:
        """One frame is unwritten at most: the next is made when that has left."""
        if not self._scheduled and not self.down and not self.cut:
            self._scheduled = True
            self._machine.loop.call_soon(self._flush)

    def _flush(self) -> None:
        self._scheduled = False
        if not self.cut and not self.down:
            self.session.flush()

    def send(self, frame: link_pb2.RouterFrame) -> None:
        if not self.cut:
            self.up.append(to_frame(frame))

    def receive(self, data: bytes) -> None:
        self.session.received(data)
        while self.session.read():
            pass

    def break_off(self) -> None:
        """What was on the way is lost."""
        if not self.cut:
            self.cut = True
            self.down.clear()
            self.up.clear()
            self._machine.loop.call_soon(self.session.closed)


class LinkMachine(RuleBasedStateMachine):
    worker_id, epoch = "d", 9  # the facts of the worker

    def __init__(self) -> None:
        super().__init__()
        self.loop = VirtualLoop()
        self.links: list[Link] = []
        self.readings: dict[int, Reading] = {}
        self.made: dict[int, list[int]] = {}  # tokens made, by number and choice
        self.serial = 0
        self.next_number = 1
        self.cancelled: list[bytes] = []
        self.attached: Link | None = None

    @initialize()
    def build(self) -> None:
        async def cancel(attempt: Attempt) -> None:
            assert not attempt.log.ended, "what has ended is not cancelled"
            self.cancelled.append(attempt.transfer_id)
            attempt.log.end(common_pb2.AttemptEnd(outcome=common_pb2.ATTEMPT_OUTCOME_CANCELLED))

        async def by_router(transfer_id: bytes) -> None:
            attempt = self.attempts.get(transfer_id)
            if attempt is not None:
                await self.attempts.cancel(attempt)

        async def make() -> Attempts[Attempt]:
            return Attempts(
                cancel=cancel,
                cancel_by_router=by_router,
                max_attempts=MAX_ATTEMPTS,
                detach_seconds=DETACH_SECONDS,
            )

        self.attempts = self.loop.run(make())

    # --- the engine --------------------------------------------------------------------------------------

    @rule(choices=st.integers(1, 3))
    def an_attempt_is_dispatched(self, choices: int) -> None:
        reading = Reading(self.next_number, choices)
        self.next_number += 1
        reference = common_pb2.HandleRef(incarnation=INCARNATION, number=reading.number)
        spec = common_pb2.GenerateSpec(n=choices)

        async def open_it() -> None:
            self.attempts.open(
                reading.transfer_id,
                reference,
                spec,
                lambda log: Attempt(reading.transfer_id, log, choices),
            )

        try:
            self.loop.run(open_it())
        except OverloadedError:
            assert len(self.attempts) == MAX_ATTEMPTS
        except StaleTransferError as error:
            raise AssertionError("numbers are never used again") from error
        else:
            self.readings[reading.number] = reading
            self.made[reading.number] = [0] * choices
        self.loop.settle()

    @rule(counts=st.lists(st.integers(1, 90), min_size=1, max_size=4))
    def steps(self, counts: list[int]) -> None:
        """Each attempt that is not paused makes so many tokens of each choice."""
        for attempt, count in zip(self.attempts.all(), counts, strict=False):
            made = self.made[int.from_bytes(attempt.transfer_id, "big")]
            for _ in range(count):
                if attempt.log.ended or any(
                    choice.end >= choice.limit + AFTER_PAUSE for choice in attempt.log.choices
                ):
                    break
                for choice in range(attempt.choices):
                    attempt.log.add(choice, made[choice], made[choice] + 1000 * choice)
                    made[choice] += 1
        self.loop.settle()

    @rule(number=NUMBERS)
    def an_attempt_ends(self, number: int) -> None:
        attempt = self.attempts.get(number.to_bytes(16, "big"))
        if attempt is not None:
            self.loop.call_soon(
                attempt.log.end, common_pb2.AttemptEnd(outcome=common_pb2.ATTEMPT_OUTCOME_DONE)
            )
            self.loop.settle()

    # --- the router --------------------------------------------------------------------------------------

    @rule()
    def a_link_is_opened(self) -> None:
        self.serial += 1
        link = Link(self, self.serial)
        self.links.append(link)
        link.send(
            link_pb2.RouterFrame(
                hello=link_pb2.LinkHello(
                    min_version=MIN_LINK_VERSION,
                    max_version=LINK_VERSION,
                    router_id="r",
                    incarnation=INCARNATION,
                    serial=self.serial,
                    worker_id=self.worker_id,
                    epoch=self.epoch,
                )
            )
        )

    @rule()
    def a_link_comes_up(self) -> None:
        self.a_link_is_opened()
        for _ in range(2):
            self.bytes_go_up(len(self.links) - 1, 4)
            self.bytes_go_down(len(self.links) - 1, 4)
        self.bytes_go_up(len(self.links) - 1, 4)

    def attach(self, link: Link) -> None:
        if self.attached is not None and self.attached.serial > link.serial:
            return
        self.attached = link
        frame = link_pb2.RouterFrame()
        for reading in self.readings.values():
            if reading.open:
                frame.attach.add(
                    transfer_id=reading.transfer_id,
                    handle=reading.number,
                    next=[len(tokens) for tokens in reading.tokens],
                    limit=reading.granted,
                )
        frame.attach_done.next_handle = self.next_number
        link.send(frame)

    @precondition(lambda self: self.links)
    @rule(which=st.integers(0, 5), count=st.integers(1, 4))
    def bytes_go_up(self, which: int, count: int) -> None:
        link = self.links[which % len(self.links)]
        for _ in range(count):
            if link.up and not link.cut:
                try:
                    self.loop.call_soon(link.receive, link.up.popleft())
                except BatonError as error:
                    raise AssertionError(f"the protocol was kept: {error}") from error
                self.loop.settle()
        if link.closed:
            link.break_off()
        self.loop.settle()

    @precondition(lambda self: self.links)
    @rule(which=st.integers(0, 5), count=st.integers(1, 4))
    def bytes_go_down(self, which: int, count: int) -> None:
        link = self.links[which % len(self.links)]
        for _ in range(count):
            if not link.down:
                return
            for message in link.frames.feed(link.down.popleft()):
                self.take(link, link_pb2.WorkerFrame.FromString(message))
            link.schedule()
            self.loop.settle()

    def take(self, link: Link, frame: link_pb2.WorkerFrame) -> None:
        if frame.HasField("welcome"):
            assert frame.welcome.version == LINK_VERSION
            self.attach(link)
            return
        columns = frame.tokens
        for number, choice, position, token in zip(
            columns.handle, columns.choice, columns.position, columns.token_id, strict=True
        ):
            reading = self.readings.get(number)
            if reading is None or not reading.open:
                continue
            tokens = reading.tokens[choice]
            assert position <= len(tokens), "a gap"
            if position == len(tokens):
                assert token == position + 1000 * choice
                tokens.append(token)
                assert len(tokens) <= reading.granted[choice], "beyond its credit"
        for end in frame.ends:
            reading = self.readings[end.handle]
            link.send(link_pb2.RouterFrame(close=[end.handle]))
            if reading.open:
                reading.ended = True
                made = self.made[end.handle]
                if end.end.outcome == common_pb2.ATTEMPT_OUTCOME_DONE:
                    assert [len(tokens) for tokens in reading.tokens] == made, "an end before its tokens"
        for number in frame.cancelled:
            assert self.attempts.get(number.to_bytes(16, "big")) is None
        for state in frame.states:
            if state.kind == link_pb2.HandleState.UNKNOWN:
                # The router would dispatch it again, and no router would read this attempt.
                assert self.attempts.get(state.handle.to_bytes(16, "big")) is None, "it is known"
                self.readings[state.handle].lost = True

    @rule(number=NUMBERS, back=st.integers(0, 40), repeat=st.booleans(), lose=st.booleans())
    def credit(self, number: int, back: int, repeat: bool, lose: bool) -> None:
        reading = self.readings.get(number)
        if reading is None or self.attached is None:
            return
        for choice, tokens in enumerate(reading.tokens):
            limit = max(reading.granted[choice], len(tokens) - back + window_of(reading.choices))
            if not lose and (repeat or limit > reading.granted[choice]):
                reading.granted[choice] = limit
                credit = link_pb2.LinkCredit(handle=number, choice=choice, limit=limit)
                for _ in range(1 + repeat):
                    self.attached.send(link_pb2.RouterFrame(credit=[credit]))

    @rule(number=NUMBERS)
    def it_cancels(self, number: int) -> None:
        reading = self.readings.get(number)
        if reading is not None and reading.open and self.attached is not None and not self.attached.cut:
            reading.cancelled = True
            self.attached.send(link_pb2.RouterFrame(cancel=[number]))

    @rule(number=NUMBERS)
    def it_asks(self, number: int) -> None:
        if self.attached is not None and number in self.readings and self.readings[number].open:
            self.attached.send(link_pb2.RouterFrame(status=[number]))

    # --- the network and time ------------------------------------------------------------------------------

    @precondition(lambda self: self.links)
    @rule(which=st.integers(0, 5))
    def a_link_breaks(self, which: int) -> None:
        self.links[which % len(self.links)].break_off()
        self.loop.settle()

    @rule(seconds=st.sampled_from([0.1, 0.3, 0.7, 2.0]))
    def time_passes(self, seconds: float) -> None:
        self.loop.pass_time(seconds)

    # --- what always holds -----------------------------------------------------------------------------------

    @invariant()
    def bounded(self) -> None:
        if not hasattr(self, "attempts"):
            return
        assert len(self.attempts) <= MAX_ATTEMPTS
        assert len(self.attempts.routers) == len(self.attempts), "a handle per attempt"
        assert len(self.cancelled) == len(set(self.cancelled)), "cancelled twice"
        for attempt in self.attempts.all():
            for choice in attempt.log.choices:
                assert len(choice.tokens) <= choice.window + AFTER_PAUSE
                assert choice.first <= choice.sent <= choice.end
        up = [link for link in self.links if link.session.state is State.UP]
        assert len(up) <= 1 or not all(link.cut is False for link in up), "one link owns the handles"

    def teardown(self) -> None:
        """With a link that holds and credit that arrives, everything comes; then nothing is left."""
        if hasattr(self, "attempts"):
            self.deliver_everything()
            self.loop.run(self.attempts.close())
            assert len(self.attempts) == 0 == len(self.attempts.routers)
        self.loop.close()

    def deliver_everything(self) -> None:
        for link in self.links:
            link.break_off()
        self.loop.settle()
        self.attached = None
        self.a_link_is_opened()
        (link,) = self.links[-1:]
        waiting = {
            one.number: self.attempts.get(one.transfer_id) for one in self.readings.values() if one.open
        }
        for _ in range(400):
            if not link.up and not link.down:
                break
            self.bytes_go_up(len(self.links) - 1, 4)
            self.bytes_go_down(len(self.links) - 1, 4)
            for reading in self.readings.values():
                self.credit(reading.number, 0, False, False)
        for number, attempt in waiting.items():
            reading = self.readings[number]
            if attempt is None:
                assert reading.lost or reading.ended
                continue
            assert [len(tokens) for tokens in reading.tokens] == self.made[number], "tokens are missing"
            assert reading.ended == attempt.log.ended


LinkMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=60, deadline=None)
TestLink = LinkMachine.TestCase
