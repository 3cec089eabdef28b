"""The answer of Embed."""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Annotated

from pydantic import PlainValidator, ValidationInfo

from cluster.security.keys import Caller
from router.dispatch.turn import Turn
from router.frontends.answer_queue import AnswerQueue
from router.frontends.embeddings import Vectors, named, read_inputs, usage_of
from router.gateway import RequestGateway
from router.observe.traces import Arrival
from router.request.completion import Completion, Delta
from router.request.embedding_options import EmbeddingOptions
from router.request.fields import limits_of, numbered, read, wrong
from router.request.permissions import timings_for
from router.request.validator import Envelope
from wire import inference_pb2 as pb


def _inputs(value: Sequence[pb.EmbedInput], info: ValidationInfo) -> list[str | Sequence[int]]:
    """Lists of ids are counted, and not copied: of a longer one that is to be truncated as much as fits the context."""
    limits = limits_of(info)
    most = limits.settings.max_prompts
    if len(value) > most:
        raise wrong(f"at most {most} at once (max_prompts)", most)
    truncates = info.data.get("truncate_prompt_tokens") is not None
    kept = (
        slice(limits.max_model_len)
        if info.data.get("truncation_side") == "right"
        else slice(-limits.max_model_len, None)
    )
    made: list[str | Sequence[int]] = []
    for index, one in enumerate(value):
        kind = one.WhichOneof("input")
        if kind is None:
            raise wrong("each entry must have text or token_ids")
        if kind == "text":
            made.append(one.text)
        elif truncates:
            made.append(one.token_ids.ids[kept])
        else:
            field = numbered("input", index, len(value))
            limits.check_lengths(len(one.token_ids.ids), field=field)
            made.append(one.token_ids.ids)
    return made


class GrpcEmbedding(EmbeddingOptions):
    input: Annotated[list[str | Sequence[int]], PlainValidator(_inputs)]


class EmbedCall:
    """One call, once its message is read. `admit` and `next_turn`: as of `read_inputs`."""

    def __init__(
        self,
        gateway: RequestGateway,
        caller: Caller,
        turn: Turn,
        admit: Callable[[int], None],
        next_turn: Callable[[], Awaitable[None]],
    ):
        self._gateway, self._caller, self._turn = gateway, caller, turn
        self._admit, self._next_turn = admit, next_turn

    async def answer(self, completions: Sequence[Completion], vectors: Vectors, arrival: Arrival) -> bytes:
        """The serialised answer. Raises BatonError."""
        gateway, caller = self._gateway, self._caller
        made = _Vectors(vectors, len(completions))
        with contextlib.ExitStack() as running:
            dispatchers = [
                running.enter_context(gateway.request(one, caller, number, arrival))
                for number, one in enumerate(completions)
            ]
            outlet, tenant = _Outlet(), caller.tenant
            queue = AnswerQueue(outlet, made.add, len(dispatchers), self._turn, tenant, streamed=False)
            await queue.pass_all(dispatchers, self._next_turn)
            outcomes = [dispatcher.outcome for dispatcher in dispatchers]
        rest = pb.EmbedResponse(
            request_id=completions[0].request_id,
            model=completions[0].model,
            usage=usage_of(outcomes),
            timings=timings_for(caller, outcomes[-1].timings),
        )
        return b"".join([*made.encoded, rest.SerializeToString()])

    async def read(
        self, request: pb.EmbedRequest, time_remaining: Callable[[], float | None]
    ) -> tuple[list[Completion], Vectors]:
        """`time_remaining`: seconds until the client's deadline, asked for once all inputs have their tokens: they wait
        for turns. Raises BatonError."""
        model = self._gateway.model(request.model)
        limits = model.validator.limits
        limits.check_model(request.model)
        given = {field.name: value for field, value in request.ListFields()}
        options = read(
            GrpcEmbedding, {name: given[name] for name in given if name in GrpcEmbedding.names}, limits
        )
        envelope = Envelope(request.request_id, request.model, prompts=len(options.input))
        completions, vectors = await read_inputs(
            self._gateway,
            model,
            named("input", options.input),
            options,
            envelope,
            self._caller,
            admit=self._admit,
            next_turn=self._next_turn,
        )
        left = time_remaining()
        if left is not None:
            completions = [
                replace(one, deadline_seconds=min(one.deadline_seconds, left)) for one in completions
            ]
        return completions, vectors


class _Vectors:
    """Collects the vectors of all inputs, each encoded as it comes: a response with `embeddings`. Responses put one after
    another are one."""

    def __init__(self, vectors: Vectors, inputs: int):
        self._vectors = vectors
        self.encoded = [b""] * inputs

    def add(self, deltas: Sequence[Delta]) -> None:
        for delta in deltas:
            for token in delta.prompt:
                one = pb.Embedding(values=self._vectors.of(token.embedding).tolist())
                self.encoded[delta.choice] = pb.EmbedResponse(embeddings=[one]).SerializeToString()


class _Outlet:
    """The outlet of a call with one answer: its client's end cancels the call's own task."""

    paused = False

    def watch(self, watcher: AnswerQueue) -> None:
        pass

    def unwatch(self) -> None:
        pass
