"""Embed in front of vectors from stubs: the limits and the vectors of `/v1/embeddings`."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock, MagicMock

import numpy as np
import pytest

from cluster.errors import DeadlineError, ForbiddenError, InvalidRequestError, OverloadedError
from cluster.protocol.pooling import Embedding, Pooling
from cluster.security.keys import Caller, RateLimits
from router.admission.admission import ByteBudget
from router.dispatch.turn import Turn
from router.frontends.grpc.service import InferenceService
from router.request.limits import FieldLimits
from tests.harness.waiting import until
from tests.router.frontends.vector_gateway import (
    DIMENSIONS,
    HOW,
    VectorGateway,
    close,
    unit,
    vector_gateway,
    vector_of,
)
from wire import common_pb2
from wire import inference_pb2 as pb

CALLER = Caller(tenant="acme", weight=2.0, max_concurrent_requests=3)
LIMITS = {"max_prompts": 4, "max_answer_entries": 100}


@pytest.fixture(scope="module")
def shared() -> Iterator[VectorGateway]:
    made = vector_gateway(LIMITS)
    made.metrics = MagicMock()
    yield made
    close(made)


@pytest.fixture
def gateway(shared: VectorGateway, monkeypatch: pytest.MonkeyPatch) -> VectorGateway:
    shared.accepted.clear()
    shared.made.clear()
    monkeypatch.setattr(shared.first.text, "embedding", HOW)
    return shared


def keyed(gateway: VectorGateway, monkeypatch: pytest.MonkeyPatch, caller: Caller = CALLER) -> Any:
    """Every call has the key of `caller`. Its quota."""
    quota = MagicMock(charge=AsyncMock(), settle=AsyncMock())
    monkeypatch.setattr(gateway, "keys", SimpleNamespace(on=True, check=lambda given: caller))
    monkeypatch.setattr(gateway, "services", SimpleNamespace(quota=quota), raising=False)
    return quota


def call(request: pb.EmbedRequest) -> Any:
    context = MagicMock()
    context.read = AsyncMock(return_value=request.SerializeToString())
    context.send_initial_metadata, context.write = AsyncMock(), AsyncMock()
    context.time_remaining.return_value = 5.0
    context.peer.return_value = "ipv4:127.0.0.1:1"
    return context


async def embed(gateway: VectorGateway, *given: str | list[int], **more: Any) -> pb.EmbedResponse:
    request = pb.EmbedRequest(**more)
    for one in given:
        if isinstance(one, str):
            request.input.add(text=one)
        else:
            request.input.add().token_ids.ids.extend(one)
    context = call(request)
    await InferenceService(gateway).Embed(MagicMock(), context)
    (written,) = context.write.call_args.args
    return pb.EmbedResponse.FromString(written)


async def test_each_input_has_its_vector_in_order(gateway: VectorGateway) -> None:
    answer = await embed(gateway, [5, 6, 7], "Once upon", [8], request_id="mine", priority=-1)
    asked = [one.prompt_tokens for one in gateway.accepted]
    assert asked[0::2] == [[5, 6, 7], [8]]
    assert asked[1] == gateway.first.text.tokenizer.encode("Once upon").ids
    assert len(answer.embeddings) == 3
    for tokens, one in zip(asked, answer.embeddings, strict=True):
        np.testing.assert_allclose(one.values, unit(vector_of(tokens)), rtol=2**-22)  # float32 has 24 bits
    assert (answer.request_id, answer.model) == ("mine", "tiny")
    assert answer.usage == pb.Usage(prompt_tokens=sum(map(len, asked)), cached_tokens=3)
    for done in gateway.accepted:
        assert (done.sampling.pooling, done.prompt_only, done.priority) == (common_pb2.POOLING_MEAN, True, -1)
        assert done.deadline_seconds == 5.0
    assert gateway.admission.in_flight == gateway.admission.bodies.held == 0


async def test_lists_of_ids_are_bounded_and_vectors_take_the_turns_of_their_tenant(
    gateway: VectorGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    keyed(gateway, monkeypatch)
    tenants: list[str] = []
    add = Turn.add

    def counted(turn: Turn, made: Any, tenant: str = "") -> Any:
        tenants.append(tenant)
        return add(turn, made, tenant)

    monkeypatch.setattr(Turn, "add", counted)
    await embed(gateway, "a")
    assert set(tenants) == {"acme"}
    with pytest.raises(InvalidRequestError, match="max_json_elements"):
        await embed(gateway, [5] * (gateway.config.max_json_elements + 1), truncate_prompt_tokens=1)
    assert gateway.admission.in_flight == gateway.admission.bodies.held == 0


async def test_vectors_are_cut_and_inputs_truncated(gateway: VectorGateway) -> None:
    long, (context,) = list(range(5, 45)), (FieldLimits.of(gateway.config, gateway.first.text).max_model_len,)
    answer = await embed(gateway, long, dimensions=4, truncate_prompt_tokens=3)
    np.testing.assert_allclose(answer.embeddings[0].values, unit(vector_of(long[-3:])[:4]), rtol=2**-22)
    await embed(gateway, long, truncate_prompt_tokens=3, truncation_side="right")
    await embed(gateway, [9] * context + long, truncate_prompt_tokens=-1)
    await embed(gateway, "a b", add_special_tokens=False, truncate_prompt_tokens=1)
    kept = [one.prompt_tokens for one in gateway.accepted]
    assert kept[:3] == [long[-3:], long[:3], long[-20:]] and len(kept[3]) == 1


REFUSED: list[tuple[list[Any], dict[str, Any], str, str]] = [
    ([], {}, "input", "is missing"),
    ([""], {}, "input", "is empty"),
    ([[]], {}, "input", "is empty"),
    ([[5] * 21], {}, "input", "20 of max_seq_length"),
    ([[5] * 100_000], {}, "input", "context"),
    (["word " * 100_000], {}, "input", "context"),
    ([[2**31]], {}, "input", "token ids must lie"),
    (["a"] * 5, {}, "input", "at most 4 at once (max_prompts)"),
    (["a", ""], {}, "input[1]", "is empty"),
    ([[5], [5] * 21], {}, "input[1]", "20 of max_seq_length"),
    (["a", [5] * 100_000], {}, "input[1]", "context"),
    (["a"], {"dimensions": 5}, "dimensions", "4, 8"),
    (["a"], {"dimensions": 0}, "dimensions", "outside"),
    (["a"], {"truncation_side": "up"}, "truncation_side", "must be one of"),
    (["a"], {"truncate_prompt_tokens": 0}, "truncate_prompt_tokens", "-1 or 1"),
    (["a"], {"priority": 2**20}, "priority", "outside"),
    (["a"], {"model": "other"}, "model", "not served"),
    (["a"], {"request_id": "\n"}, "request_id", "printable"),
]


async def test_refusals_name_their_fields(gateway: VectorGateway, monkeypatch: pytest.MonkeyPatch) -> None:
    for given, more, field, said in REFUSED:
        with pytest.raises(InvalidRequestError) as caught:
            await embed(gateway, *given, **more)
        assert caught.value.field == field and said in caught.value.message, (given, more)
    with pytest.raises(InvalidRequestError, match="text or token_ids") as caught:
        await InferenceService(gateway).Embed(MagicMock(), call(pb.EmbedRequest(input=[pb.EmbedInput()])))
    assert caught.value.field == "input"
    monkeypatch.setattr(gateway.first.text, "embedding", Embedding(Pooling.MEAN, 50, normalised=True))
    with pytest.raises(
        InvalidRequestError, match=r"3 inputs x 50 dimensions exceed 100 \(max_answer_entries"
    ):
        await embed(gateway, "a", "b", "c")
    monkeypatch.setattr(gateway.first.text, "embedding", None)
    monkeypatch.setattr(gateway.first.text, "embedding_refusal", "for a reason")
    with pytest.raises(InvalidRequestError, match="for a reason"):
        await embed(gateway, "a")
    assert not gateway.accepted and gateway.admission.in_flight == 0


async def test_inputs_that_wait_for_a_thread_too_long_are_named(
    gateway: VectorGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def never(*given: Any, **named: Any) -> Any:
        await asyncio.Event().wait()

    monkeypatch.setattr(gateway.first.text, "encode", never)
    monkeypatch.setattr(gateway, "config", gateway.config.model_copy(update={"request_seconds": 0.01}))
    with pytest.raises(DeadlineError, match=r"^input: it was not tokenised") as caught:
        await embed(gateway, "a")
    assert (caught.value.field, gateway.admission.in_flight) == ("input", 0)


async def test_each_input_takes_a_place_a_turn_and_the_quota(
    gateway: VectorGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    quota, turns = keyed(gateway, monkeypatch), []

    async def turn(tenant: str, weight: float, client: Any = None, model: str = "") -> None:
        turns.append(gateway.admission.in_flight)

    monkeypatch.setattr(gateway.admission.starts, "turn", turn)
    answer = await embed(gateway, "a", "b", "c")
    assert answer.timings == pb.Timings(prefill_seconds=0.5)  # its worker is for admins
    assert turns == [1, 3, 3, 3, 3]  # to parse; to tokenise and to dispatch all but the first
    assert quota.check.called and gateway.admission.in_flight == 0
    with pytest.raises(OverloadedError, match="3 requests in flight"):
        await embed(gateway, "a", "b", "c", "d")
    assert gateway.admission.in_flight == 0
    keyed(gateway, monkeypatch, Caller(tenant="acme", max_priority="batch"))
    with pytest.raises(ForbiddenError, match="allows at most batch"):
        await embed(gateway, "a", priority=0)
    quota.check.side_effect = OverloadedError("used up")
    monkeypatch.setattr(gateway, "services", SimpleNamespace(quota=quota))
    with pytest.raises(OverloadedError, match="used up"):
        await embed(gateway, "a")
    assert len(gateway.accepted) == 3 and gateway.admission.in_flight == gateway.admission.bodies.held == 0


async def test_a_cancelled_call_stops_all_its_inputs(
    gateway: VectorGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gateway, "silent", True)
    asking = asyncio.create_task(embed(gateway, "a", "b"))
    await until(lambda: len(gateway.made) == 2, "its inputs are dispatched", 5)
    await asyncio.sleep(0)
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    assert all(one.stopped for one in gateway.made)
    assert gateway.admission.in_flight == gateway.admission.bodies.held == 0


async def test_an_unread_answer_counts_in_the_budget_of_bodies(
    gateway: VectorGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    held: list[int] = []
    monkeypatch.setattr("router.admission.admission.FREE_BYTES", 0)
    request = pb.EmbedRequest(input=[pb.EmbedInput(text="a")])
    context = call(request)

    async def write(answer: bytes) -> None:
        held.append(gateway.admission.bodies.held - len(answer))

    context.write = write
    await InferenceService(gateway).Embed(MagicMock(), context)
    assert held == [0] and gateway.admission.bodies.held == 0


async def test_vectors_without_room_are_refused_before_they_are_computed(
    gateway: VectorGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As over HTTP; what has room is held meanwhile."""
    bodies, size = ByteBudget(1000, 1000, lambda tenant: None), 2 * 4 * DIMENSIONS
    monkeypatch.setattr("router.admission.admission.FREE_BYTES", 0)
    monkeypatch.setattr(gateway.admission, "bodies", bodies)
    limits = RateLimits(requests_per_minute=9)
    quota = keyed(gateway, monkeypatch, Caller(tenant="acme", rate_limits=limits))
    unread = bodies.hold("")
    unread.hold_answer(1000 - size + 1)
    with pytest.raises(OverloadedError, match="unread answers") as caught:
        await embed(gateway, "a", "b")
    assert caught.value.field == "body" and not gateway.accepted
    assert quota.charge.await_count == quota.settle.await_count == 1, "its inputs were tokenised"
    unread.hold_answer(1000 - size)
    monkeypatch.setattr(gateway, "silent", True)
    asking = asyncio.create_task(embed(gateway, "a", "b"))
    await until(lambda: len(gateway.made) == 2, "its inputs are dispatched", 5)
    assert bodies.held == 1000
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    assert bodies.held == 1000 - size


async def test_the_list_of_models_says_what_each_embeds(
    gateway: VectorGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def listed() -> pb.Model:
        context = call(pb.EmbedRequest())
        await InferenceService(gateway).ListModels(MagicMock(), context)
        (model,) = pb.ListModelsResponse.FromString(context.write.call_args.args[0]).models
        return model

    wanted = pb.ModelEmbedding(dimensions=8, pooling="mean", normalised=True, max_tokens=20)
    assert (await listed()).embedding == wanted and not (await listed()).embeds_only
    monkeypatch.setattr(gateway.first.text, "embedding", None)
    monkeypatch.setattr(gateway.first.text, "embedding_refusal", "for a reason")
    monkeypatch.setattr(gateway.first.text, "has_head", False)
    model = await listed()
    assert (model.HasField("embedding"), model.embedding_reason, model.embeds_only) == (
        False,
        "for a reason",
        True,
    )
