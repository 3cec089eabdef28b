"""Attempts and their logs under any order of tokens, ends, readers that come, fall behind, go away and come back."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from cluster.errors import OverloadedError, StaleTransferError
from wire import common_pb2
from worker.attempt_log import AttemptLog
from worker.attempts import Attempts

TRANSFERS = st.sampled_from([bytes([i]) * 16 for i in range(1, 6)])
MAX_ATTEMPTS = 3
DETACH_SECONDS = 0.02


@dataclass(eq=False)
class Attempt:
    transfer_id: bytes
    log: AttemptLog = field(default_factory=lambda: AttemptLog(lambda: 1))
    tokens: int = 0


@dataclass(eq=False)
class Reader:
    attempt: Attempt
    events: AsyncGenerator[common_pb2.AttemptEvent, None]
    next_position: int
    ended: bool = False


class AttemptsMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.cancelled: list[bytes] = []
        self.readers: dict[bytes, Reader] = {}  # the newest of each attempt
        self.over: set[bytes] = set()

    @initialize()
    def build(self) -> None:
        async def cancel(attempt: Attempt) -> None:
            assert not attempt.log.ended, "what has ended is not cancelled"
            self.cancelled.append(attempt.transfer_id)
            attempt.log.end(common_pb2.AttemptEnd(outcome=common_pb2.ATTEMPT_OUTCOME_CANCELLED))

        async def make() -> Attempts[Attempt]:
            return Attempts(cancel=cancel, max_attempts=MAX_ATTEMPTS, detach_seconds=DETACH_SECONDS)

        self.attempts = self.loop.run_until_complete(make())

    def inside(self, function: Any, *arguments: Any) -> Any:
        async def call() -> Any:
            try:
                return function(*arguments)
            finally:
                for _ in range(4):
                    await asyncio.sleep(0)

        return self.loop.run_until_complete(call())

    @rule(transfer=TRANSFERS)
    def open(self, transfer: bytes) -> None:
        if self.attempts.get(transfer) is not None:
            return  # the roles give the first answer again
        full = len(self.attempts) >= MAX_ATTEMPTS
        if transfer in self.over or self.attempts.is_ended(transfer):
            with pytest.raises(StaleTransferError):
                self.inside(self.attempts.open, Attempt(transfer))
        elif full:
            with pytest.raises(OverloadedError):
                self.inside(self.attempts.open, Attempt(transfer))
        else:
            self.inside(self.attempts.open, Attempt(transfer))

    @rule(transfer=TRANSFERS, count=st.integers(1, 4))
    def tokens_come(self, transfer: bytes, count: int) -> None:
        attempt = self.attempts.get(transfer)
        if attempt is None or attempt.log.ended:
            return
        for _ in range(count):
            token = common_pb2.Token(position=attempt.tokens)
            attempt.tokens += 1
            self.inside(attempt.log.add, token)

    @rule(transfer=TRANSFERS)
    def ends(self, transfer: bytes) -> None:
        attempt = self.attempts.get(transfer)
        if attempt is not None:
            end = common_pb2.AttemptEnd(outcome=common_pb2.ATTEMPT_OUTCOME_DONE)
            self.inside(attempt.log.end, end)
            self.inside(self.attempts.expect_reader, attempt)

    @rule(transfer=TRANSFERS, position=st.integers(0, 3))
    def reader_comes(self, transfer: bytes, position: int) -> None:
        """Reads at once whatever there is, so that it counts as a reader; the one before it is over."""
        attempt = self.attempts.get(transfer)
        if attempt is None or not (attempt.log.ended or attempt.tokens > position):
            return
        before = self.readers.get(transfer)
        events = self.attempts.read(attempt, position)
        self.readers[transfer] = Reader(attempt, events, position)
        self.reads(transfer)
        if before is not None and not before.ended:
            self.loop.run_until_complete(before.events.aclose())

    @rule(transfer=TRANSFERS)
    def reads(self, transfer: bytes) -> None:
        """One event, where one is there: tokens in order, none twice, none left out, then the end."""
        reader = self.readers.get(transfer)
        if reader is None or reader.ended:
            return
        attempt = reader.attempt
        if reader.next_position >= attempt.tokens and not attempt.log.ended:
            return
        event = self.loop.run_until_complete(anext(reader.events))
        if event.WhichOneof("event") == "token":
            assert event.token.position == reader.next_position
            reader.next_position += 1
        else:
            assert event.WhichOneof("event") == "end"
            assert reader.next_position >= attempt.tokens
            reader.ended = True
            with contextlib.suppress(StopAsyncIteration):
                self.loop.run_until_complete(anext(reader.events))
            self.over.add(transfer)
            assert self.attempts.get(transfer) is None, "an attempt whose end was taken is forgotten"

    @rule(transfer=TRANSFERS)
    def reader_goes(self, transfer: bytes) -> None:
        reader = self.readers.pop(transfer, None)
        if reader is not None and not reader.ended:
            self.loop.run_until_complete(reader.events.aclose())

    @rule(transfer=TRANSFERS)
    def its_router_cancels_it(self, transfer: bytes) -> None:
        """No reader comes back: it is dropped at once, and a reader that is still there gets the end."""
        attempt = self.attempts.get(transfer)
        if attempt is None:
            return
        self.loop.run_until_complete(self.attempts.cancel(attempt))
        assert attempt.log.ended
        assert self.attempts.get(transfer) is None
        self.over.add(transfer)

    @rule()
    def time_passes(self) -> None:
        """Longer than an attempt may be without a reader."""
        alone = [one for one in self.attempts.all() if not one.log.has_reader]
        self.loop.run_until_complete(asyncio.sleep(1.5 * DETACH_SECONDS))
        for attempt in alone:
            assert self.attempts.get(attempt.transfer_id) is None, "it is not read, and it is still there"
            assert attempt.log.ended
            self.over.add(attempt.transfer_id)

    @rule(transfer=TRANSFERS)
    def another_router_ends_it(self, transfer: bytes) -> None:
        """The arbiter's word may come before the attempt."""
        self.inside(self.attempts.remember_ended, transfer)
        if self.attempts.get(transfer) is None:
            self.over.add(transfer)

    @invariant()
    def bounded(self) -> None:
        if hasattr(self, "attempts"):
            assert len(self.attempts) <= MAX_ATTEMPTS
            assert len(self.cancelled) == len(set(self.cancelled)), "cancelled twice"
            assert not any(self.attempts.get(transfer) for transfer in self.over)

    def teardown(self) -> None:
        if hasattr(self, "attempts"):
            for transfer in list(self.readers):
                self.reader_goes(transfer)
            self.loop.run_until_complete(self.attempts.close())
            assert len(self.attempts) == 0
        self.loop.close()


AttemptsMachine.TestCase.settings = settings(max_examples=30, stateful_step_count=40, deadline=None)
TestAttempts = AttemptsMachine.TestCase
