"""What an answer of Tokenize holds while its client does not read it."""

from __future__ import annotations

import asyncio
import gc
from typing import Any
from unittest.mock import AsyncMock, MagicMock

import grpc
import pytest

from cluster.errors import InvalidRequestError
from router.frontends.grpc.refusal import refusing
from router.frontends.grpc.service import InferenceService
from wire import inference_pb2 as pb

TOKENS = 54_321  # no other list has this length


def lists() -> int:
    return sum(type(one) is list and len(one) == TOKENS for one in gc.get_objects())


def service(most: int) -> InferenceService:
    gateway = MagicMock()
    gateway.keys.on = False
    gateway.config.max_answer_entries = most
    gateway.config.body_seconds = gateway.config.write_seconds = 30.0

    async def encode(*_: object, **__: object) -> list[int]:
        return list(range(TOKENS))

    gateway.encode = encode
    gateway.admission.starts.turn = AsyncMock()
    gateway.further = {}
    gateway.counted.return_value.__aexit__.return_value = False
    gateway.admission.admit.return_value.__exit__.return_value = False
    return InferenceService(gateway)


def call() -> Any:
    context = MagicMock()
    context.read = AsyncMock(return_value=pb.TokenizeRequest(text="a").SerializeToString())
    context.send_initial_metadata = AsyncMock()
    context.write = AsyncMock()
    return context


async def test_an_unread_answer_holds_its_bytes_only() -> None:
    """400 of them, whose lists of ids stayed, took 424 MiB."""
    context, held = call(), []

    async def write(answer: bytes) -> None:
        held.append(lists())
        assert len(pb.TokenizeResponse.FromString(answer).token_ids) == TOKENS

    context.write = write
    await service(TOKENS).Tokenize(MagicMock(), context)
    assert held == [0]


async def test_an_answer_has_as_many_tokens_as_any_other() -> None:
    context = call()
    with pytest.raises(InvalidRequestError) as caught:
        await service(TOKENS - 1).Tokenize(MagicMock(), context)
    assert (caught.value.field, caught.value.limit) == ("prompt", str(TOKENS - 1))
    context.write.assert_not_called()


async def test_a_write_that_fails_because_the_client_left_cancels_the_call() -> None:
    """As an exception of the handler, it would be logged with its traceback."""
    context = call()
    context.write = AsyncMock(side_effect=grpc.aio.InternalError("sent nothing"))
    with pytest.raises(asyncio.CancelledError):
        await refusing(service(TOKENS).Tokenize)(MagicMock(), context)
