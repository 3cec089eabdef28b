"""What an answer of Tokenize holds while its client does not read it."""

from __future__ import annotations

import asyncio
import gc
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import AsyncMock, MagicMock

import grpc
import pytest

from cluster.errors import CancelledError, InvalidRequestError, OverloadedError
from cluster.security.keys import ANYONE
from router.admission.admission import FREE_BYTES, ByteBudget, Place
from router.admission.shares import Taken
from router.frontends.grpc.refusal import refusing
from router.frontends.grpc.service import InferenceService
from router.request.answer_plan import ChatPrompt
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


def call(request: pb.TokenizeRequest | None = None) -> Any:
    context = MagicMock()
    request = request or pb.TokenizeRequest(text="a")
    context.read = AsyncMock(return_value=request.SerializeToString())
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


async def test_an_unread_answer_counts_in_the_budget_of_bodies() -> None:
    made, context = service(TOKENS), call()
    bodies = ByteBudget(200_000, 200_000, lambda tenant: None)
    gateway: Any = made._gateway
    place = gateway.admission.admit.return_value.__enter__.return_value
    place.body, place.model = bodies.hold("a"), ""
    during: list[int] = []

    async def write(answer: bytes) -> None:
        during.append(bodies.held - (len(answer) - FREE_BYTES))

    context.write = write
    await made.Tokenize(MagicMock(), context)
    assert during == [0]
    place.body.release()  # as its place ends
    bodies.hold("b").grow_to(FREE_BYTES + 200_000)
    with pytest.raises(OverloadedError):
        await made.Tokenize(MagicMock(), context)
    assert during == [0]


async def test_an_answer_has_as_many_tokens_as_any_other() -> None:
    context = call()
    with pytest.raises(InvalidRequestError) as caught:
        await service(TOKENS - 1).Tokenize(MagicMock(), context)
    assert (caught.value.field, caught.value.limit) == ("prompt", str(TOKENS - 1))
    context.write.assert_not_called()


async def test_a_request_without_a_prompt_is_refused() -> None:
    context = call(pb.TokenizeRequest(model="m"))
    with pytest.raises(InvalidRequestError) as caught:
        await service(TOKENS).Tokenize(MagicMock(), context)
    assert caught.value.field == "prompt"
    context.write.assert_not_called()


async def test_a_write_that_fails_because_the_client_left_cancels_the_call() -> None:
    """As an exception of the handler, it would be logged with its traceback."""
    context = call()
    context.write = AsyncMock(side_effect=grpc.aio.InternalError("sent nothing"))
    with pytest.raises(asyncio.CancelledError):
        await refusing(service(TOKENS).Tokenize)(MagicMock(), context)


async def test_a_name_that_leads_elsewhere_meanwhile_is_its_first_model_s() -> None:
    """An adapter of a further model that is unloaded while its request waits: the first model's tokenizer answered."""
    made, context, asked = service(TOKENS), call(pb.TokenizeRequest(model="tuned", text="a")), list[str]()
    gateway: Any = made._gateway
    second = MagicMock()
    second.name = "second"
    gateway.model.side_effect = [second]

    async def encode(*_: object, model: str, **__: object) -> list[int]:
        asked.append(model)
        return [5]

    gateway.encode = encode
    await made.Tokenize(MagicMock(), context)
    assert asked == ["second"] and gateway.model.call_count == 1


async def test_no_grammar_is_made_where_nothing_is_generated() -> None:
    made, chat = service(TOKENS), pb.ChatMessages(messages=[pb.ChatMessage(role="user", content="hi")])
    gateway: Any = made._gateway
    gateway.model.return_value.validator.limits.settings.max_tools = 1
    gateway.converse = AsyncMock(return_value=ChatPrompt([5]))
    await made.Tokenize(MagicMock(), call(pb.TokenizeRequest(chat=chat)))
    assert gateway.converse.call_args.kwargs["answered"] is False
    await made._prompt(pb.GenerateRequest(chat=chat), gateway.model(""), MagicMock(), None)
    assert gateway.converse.call_args.kwargs["answered"] is True


async def test_a_connection_that_is_not_read_at_all_holds_no_call() -> None:
    """The metadata waits there before the answer, and had no deadline: each call kept its place until the
    connection ended, after an hour."""
    made, context, during = service(TOKENS), call(), list[str]()
    gateway: Any = made._gateway
    gateway.config.write_seconds = 0.05

    async def never(_: object) -> None:
        during.append("waits")
        await asyncio.Event().wait()

    context.send_initial_metadata = never
    async with asyncio.timeout(10):
        with pytest.raises(CancelledError, match="write_seconds"):
            await made.Tokenize(MagicMock(), context)
    assert during == ["waits"]
    context.write.assert_not_called()


async def test_an_answer_that_is_never_read_counts_until_its_call_ends() -> None:
    """gRPC keeps it as long, with the status behind it: what a client left unread again and again had no bound."""
    made, context = service(TOKENS), call()
    bodies = ByteBudget(200_000, 200_000, lambda tenant: None)
    gateway: Any = made._gateway
    gateway.config.write_seconds = 0.5
    gateway.admission.admit.return_value = Place(cast(Any, SimpleNamespace(bodies=bodies)), ANYONE, Taken(()))
    answers: list[bytes] = []

    async def never(answer: bytes) -> None:
        answers.append(answer)
        await asyncio.Event().wait()

    context.write = never
    async with asyncio.timeout(10):
        with pytest.raises(CancelledError, match="write_seconds"):
            await made.Tokenize(MagicMock(), context)
    assert bodies.held == len(answers[0]) - FREE_BYTES > 0
    (ended,) = context.add_done_callback.call_args.args
    ended(context)
    assert bodies.held == 0


async def test_a_call_whose_metadata_waited_too_long_gets_its_status_once_they_are_written() -> None:
    """gRPC refuses a status while they wait: the call of a client that read on later stayed open without one."""
    made, context, steps = service(TOKENS), call(), list[str]()
    read_on = asyncio.Event()
    gateway: Any = made._gateway
    gateway.config.write_seconds = 0.05

    async def metadata(_: object) -> None:
        await read_on.wait()
        steps.append("metadata")

    async def abort(*_: object, **__: object) -> None:
        steps.append("status")
        raise asyncio.CancelledError

    def left(*_: object) -> bool:
        steps.append("place left")
        asyncio.get_running_loop().call_later(0.1, read_on.set)
        return False

    context.send_initial_metadata, context.abort = metadata, abort
    gateway.admission.admit.return_value.__exit__.side_effect = left
    async with asyncio.timeout(10):
        with pytest.raises(asyncio.CancelledError):
            await refusing(made.Tokenize)(MagicMock(), context)
    assert steps == ["place left", "metadata", "status"]
