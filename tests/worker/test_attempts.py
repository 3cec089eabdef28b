"""Attempts by transfer id: opened, forgotten, refused, cancelled to the end."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from cluster.errors import DrainingError, InvalidRequestError, OverloadedError, StaleTransferError
from tests.harness.waiting import until
from wire import common_pb2
from worker.attempt_log import AttemptLog
from worker.attempts import Attempts

T = b"t" * 16


@dataclass(eq=False)
class Attempt:
    transfer_id: bytes
    log: AttemptLog


def make(cancel: Callable[[Any], Any], **how: Any) -> Attempts[Attempt]:
    async def by_router(transfer_id: bytes) -> None:
        attempt = made.get(transfer_id)
        if attempt is not None:
            await made.cancel(attempt)

    made: Attempts[Attempt] = Attempts(
        cancel=cancel, cancel_by_router=by_router, max_attempts=4, **{"detach_seconds": 0.1, **how}
    )
    return made


def opened(
    attempts: Attempts[Attempt], transfer_id: bytes = T, number: int = 1, adapter: str = ""
) -> Attempt:
    reference = common_pb2.HandleRef(incarnation=5, number=number)
    return attempts.open(
        transfer_id,
        reference,
        common_pb2.GenerateSpec(adapter=adapter),
        lambda log: Attempt(transfer_id, log),
    )


@pytest.fixture
def cancelled() -> list[bytes]:
    return []


@pytest.fixture
def attempts(cancelled: list[bytes]) -> Attempts[Attempt]:
    async def cancel(attempt: Attempt) -> None:
        cancelled.append(attempt.transfer_id)

    return make(cancel)


async def gone(attempts: Attempts[Attempt]) -> None:
    await until(lambda: not len(attempts), "they have ended")


async def test_one_whose_router_never_comes_is_cancelled_and_refused(attempts, cancelled):
    opened(attempts)
    await gone(attempts)
    assert cancelled == [T] and len(attempts.routers) == 0
    with pytest.raises(StaleTransferError):
        opened(attempts)


async def test_one_that_ended_without_a_router_is_forgotten(attempts, cancelled):
    opened(attempts).log.end(common_pb2.AttemptEnd())
    await gone(attempts)
    assert not cancelled and attempts.is_ended(T)


async def test_a_handle_stands_for_one_attempt(attempts):
    opened(attempts)
    with pytest.raises(InvalidRequestError, match="handle 1 is in use"):
        opened(attempts, b"u" * 16)
    with pytest.raises(InvalidRequestError, match="incarnation"):
        attempts.open(
            b"u" * 16, common_pb2.HandleRef(), common_pb2.GenerateSpec(), lambda log: Attempt(T, log)
        )
    assert len(attempts) == 1
    await attempts.close()


async def test_more_than_the_worker_may_have_are_refused(attempts):
    for i in range(4):
        opened(attempts, bytes([i]) * 16, i)
    with pytest.raises(OverloadedError, match="already has 4"):
        opened(attempts, b"u" * 16, 9)
    await attempts.close()
    assert len(attempts) == len(attempts.routers) == 0


async def test_a_cancelled_one_is_gone_at_once_and_refused(attempts, cancelled):
    await attempts.cancel(opened(attempts))
    assert len(attempts) == len(attempts.routers) == 0
    assert cancelled == [T]
    with pytest.raises(StaleTransferError):
        opened(attempts)


async def test_one_that_another_call_ended_before_it_came_is_refused(attempts):
    attempts.remember_ended(T)
    with pytest.raises(StaleTransferError):
        opened(attempts)


async def test_a_cancel_whose_caller_hangs_up_is_done_to_its_end():
    begun, may_end = asyncio.Event(), asyncio.Event()

    async def cancel(attempt: Attempt) -> None:
        begun.set()
        await may_end.wait()

    attempts = make(cancel, detach_seconds=60.0)
    caller = asyncio.create_task(attempts.cancel(opened(attempts)))
    await begun.wait()
    caller.cancel()
    with pytest.raises(asyncio.CancelledError):
        await caller
    may_end.set()
    await gone(attempts)


async def test_an_attempt_that_cannot_be_cancelled_does_not_keep_the_others():
    """A stopped engine refuses every call; the worker must still end each attempt, and exit."""
    cancelled: list[bytes] = []

    async def cancel(attempt: Attempt) -> None:
        if attempt.transfer_id == b"0" * 16:
            raise DrainingError("the engine has stopped")
        cancelled.append(attempt.transfer_id)

    attempts = make(cancel, detach_seconds=60.0)
    for number, name in enumerate((b"0", b"1")):
        opened(attempts, name * 16, number)
    await attempts.close()
    assert cancelled == [b"1" * 16]
    assert len(attempts) == 0


async def test_all_attempts_are_cancelled_at_once():
    """Between two steps of the engine: one by one each would take one, and a fenced worker stay away for as long."""
    begun: list[bytes] = []
    may_end = asyncio.Event()

    async def cancel(attempt: Attempt) -> None:
        begun.append(attempt.transfer_id)
        await may_end.wait()

    attempts = make(cancel, detach_seconds=60.0)
    for number in range(1, 4):
        opened(attempts, bytes([number]) * 16, number)
    closing = asyncio.create_task(attempts.cancel_all())
    await until(lambda: len(begun) == 3, "each cancel has begun", 5.0)
    assert len(attempts) == 3
    may_end.set()
    await closing
    assert not len(attempts)


async def test_adapters_are_held_from_the_opening_of_an_attempt_to_its_end(attempts):
    """Also while it waits for its turn, when the engine has nothing of it."""
    opened(attempts)
    assert attempts.adapters_held() == set()
    opened(attempts, b"u" * 16, 2, "digest")
    assert attempts.adapters_held() == {"digest"}
    attempts.forget(b"u" * 16)
    assert attempts.adapters_held() == set()
