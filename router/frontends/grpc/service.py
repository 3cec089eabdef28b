"""The Inference service. It parses messages itself: grpc.aio would answer malformed ones with UNKNOWN."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from functools import partial
from typing import Annotated, Any, TypeVar

import grpc
from google.protobuf.message import Message
from pydantic import PlainValidator

from cluster.errors import CancelledError, InvalidRequestError, OverloadedError
from cluster.grammar.spec import GrammarSpec, grammar_from_wire
from cluster.security.keys import Caller
from router.admission.admission import Place
from router.dispatch.services import Identity
from router.dispatch.turn import Turn
from router.frontends.answer_room import expect_answer
from router.frontends.exclusions import read_exclusions
from router.frontends.grpc.conversation import (
    check_conversation,
    named_in_chat,
    read_conversation,
    size_of,
)
from router.frontends.grpc.embed import EmbedCall
from router.frontends.grpc.gate import Context, caller_of
from router.frontends.grpc.message import parse, read_message
from router.frontends.grpc.refusal import generic_handler
from router.frontends.grpc.stream import GenerateStream
from router.frontends.grpc.write_deadline import write_all
from router.frontends.start_turn import start_turn
from router.gateway import RequestGateway
from router.observe.traces import Arrival
from router.request import model_hint
from router.request.answer_plan import AnswerPlan, ChatPrompt
from router.request.completion import Completion
from router.request.fields import read, refuse, wrong
from router.request.grammar.requested import RequestedGrammar, json_spec, lark_spec, text_spec
from router.request.limits import FieldLimits
from router.request.options import GenerationOptions, LogprobCount
from router.request.permissions import check_allowed
from router.request.served_model import ServedModel, listed
from router.request.token_options import Exclusions, TokenOptions
from router.request.validator import Envelope
from wire import common_pb2
from wire import inference_pb2 as pb

SERVICE = "baton.v1.Inference"
M = TypeVar("M", bound=Message)


_CHECKED: Mapping[str, Callable[[str], GrammarSpec]] = {
    "json_schema": json_spec,
    "lark": lark_spec,
    "regex": partial(text_spec, "regex"),
}


def _grammar(message: common_pb2.Grammar) -> RequestedGrammar:
    try:
        spec = grammar_from_wire(message)
        make = _CHECKED.get(spec.kind)
        return RequestedGrammar("grammar", spec if make is None else make(spec.text))
    except InvalidRequestError as error:
        raise wrong(error.message.removeprefix("grammar: "), error.limit) from None
    except ValueError as error:
        raise wrong(str(error)) from None


class GrpcOptions(TokenOptions):
    grammar: Annotated[RequestedGrammar | None, PlainValidator(_grammar)] = None
    prompt_logprobs: LogprobCount | None = None

    @property
    def asked_grammar(self) -> RequestedGrammar | None:
        return self.grammar

    @property
    def prompt_alternatives(self) -> int | None:
        return self.prompt_logprobs


class InferenceService:
    def __init__(self, gateway: RequestGateway):
        self._gateway = gateway
        self._turn = Turn()

    def handler(self) -> grpc.GenericRpcHandler[Any, Any]:
        return generic_handler(SERVICE, self.Generate, self.Embed, self.Tokenize, self.ListModels)

    async def Generate(self, messages: AsyncIterator[bytes], context: Context) -> None:
        caller = caller_of(self._gateway, context)
        with await self._admitted(caller, context) as place:
            raw = await read_message(context, self._gateway.config, place.body)
            self._gateway.check_message(len(raw))
            arrival = Arrival(lambda name: _values(context, name))
            await self._turn_to_parse(caller, place, raw, pb.GenerateRequest())
            request = await self._parsed(pb.GenerateRequest(), raw, caller)
            self._gateway.enter_model(place, caller, request.model)
            completion, identity = await self._completion(request, context, caller)
            del request
            del raw
            place.body.release()
            with self._gateway.request(completion, caller, 0, arrival, identity) as dispatcher:
                stream = GenerateStream(dispatcher, completion, caller)
                await stream.pass_to(context, self._gateway.config, self._turn)

    async def Embed(self, messages: AsyncIterator[bytes], context: Context) -> None:
        """Vectors of the inputs. Each takes a place, a turn, and counts as a request."""
        caller, gateway = caller_of(self._gateway, context), self._gateway
        with await self._admitted(caller, context) as place:
            raw = await read_message(context, gateway.config, place.body)
            arrival = Arrival(lambda name: _values(context, name))
            await self._turn_to_parse(caller, place, raw, pb.EmbedRequest())
            request = await self._parsed(pb.EmbedRequest(), raw, caller)
            del raw
            gateway.enter_model(place, caller, request.model)
            with contextlib.ExitStack() as held:
                call = EmbedCall(
                    gateway,
                    caller,
                    self._turn,
                    lambda count: gateway.admit_further(held, place, caller, context.peer(), count),
                    lambda: start_turn(gateway, caller, place.model),
                )
                async with self._counted_if_left(caller, gateway.model(request.model)):
                    completions, vectors = await call.read(request, context.time_remaining)
                del request
                size = vectors.packed_bytes * len(completions)
                await expect_answer(gateway, caller, place, completions[0].served_model, size, size)
                answer = await call.answer(completions, vectors, arrival)
                place.body.hold_answer(len(answer), place.model)
                await self._answer(answer, context, place)

    async def _admitted(self, caller: Caller, context: Context) -> Place:
        """Admission.admit. What is refused takes a step of low priority: its client may ask again at once."""
        try:
            return self._gateway.admission.admit(caller, context.peer())
        except OverloadedError:
            await self._gateway.low_priority.refuse(caller.tenant)
            raise

    async def _turn_to_parse(self, caller: Caller, place: Place, raw: bytes, message: Message) -> None:
        """Wait for the turn of a request whose bytes are there. `message`: an empty one of its kind.

        Raises OverloadedError where its model has no place left.
        """
        gateway, expected = self._gateway, ""
        if gateway.further:
            hint = model_hint.of_message(raw)
            expected = await gateway.expect_model(
                place, caller, hint, lambda: model_hint.message_names(raw, hint, message)
            )
        await start_turn(gateway, caller, expected)

    async def _parsed(self, message: M, raw: bytes, caller: Caller) -> M:
        """The message from its bytes. Numbers of lists are bounded as over HTTP, unless a context has room for more: each
        takes 7 to 25 ns to parse, on the event loop. Raises InvalidRequestError."""
        gateway = self._gateway
        contexts = (one.validator.limits.max_model_len for one in gateway.models)
        most = max(gateway.config.max_json_elements, *contexts)
        return await parse(message, raw, gateway.low_priority, caller.tenant, most)

    async def _answer(self, response: bytes, context: Context, place: Place) -> None:
        """Raises CancelledError (cluster.errors) if its client reads nothing for `write_seconds`."""
        try:
            await write_all(_only(response), context, self._gateway.config)
        except CancelledError:
            # gRPC keeps it until the call ends, which may be as late as the connection's end: so long its bytes count.
            kept = place.keep_body()
            context.add_done_callback(lambda _: kept.release())  # type: ignore[arg-type]  # a class in the stubs
            raise

    async def _completion(
        self, request: pb.GenerateRequest, context: Context, caller: Caller
    ) -> tuple[Completion, Identity | None]:
        """The request, with its identity where that was needed to check its ticket."""
        kind = request.WhichOneof("prompt")
        model = self._gateway.model(request.model)
        limits = model.validator.limits
        limits.check_model(request.model)
        limits.check_lengths(len(request.token_ids.ids), len(request.resume_tokens.ids))
        options = _options(request, limits)
        if kind is None:
            raise InvalidRequestError("prompt: is missing; send text, token_ids or chat", field="prompt")
        costly = kind != "token_ids" or options.asked_grammar is not None or bool(options.excluded_words)
        resumed = bool(request.resume_ticket)
        async with (
            contextlib.nullcontext() if resumed else self._counted_if_left(caller, model),
            self._gateway.preparing(caller, model.name, resumed=resumed, costly=costly),
        ):
            prompt = await self._prompt(request, model, caller, options.asked_grammar)
            exclusions = await read_exclusions(self._gateway, model, options, caller.tenant)
            envelope = _envelope(request, context, exclusions)
            made = model.validator.completion(prompt.tokens, options, envelope, prompt.plan, prompt.field)
            check_allowed(made, caller, model.name)
            identity = self._gateway.check_ticket(made, caller) if resumed else None
        return made, identity

    @contextlib.asynccontextmanager
    async def _counted_if_left(self, caller: Caller, model: ServedModel) -> AsyncIterator[None]:
        """A call that its client leaves while it is prepared has cost as much as one that is refused."""
        try:
            yield
        except asyncio.CancelledError:
            self._gateway.services.clean_up(self._count(caller, model))
            raise

    async def _count(self, caller: Caller, model: ServedModel) -> None:
        with contextlib.suppress(OverloadedError):  # none is left
            async with self._gateway.counted(caller, model.name):
                pass

    async def Tokenize(self, messages: AsyncIterator[bytes], context: Context) -> None:
        """Tokenise a text or a conversation. That costs as much as the preparation of a generation, so it takes a place
        and counts as a request."""
        caller = caller_of(self._gateway, context)
        with await self._admitted(caller, context) as place:
            raw = await read_message(context, self._gateway.config, place.body)
            self._gateway.check_message(len(raw))
            await self._turn_to_parse(caller, place, raw, pb.TokenizeRequest())
            request = await parse(pb.TokenizeRequest(), raw, self._gateway.low_priority, caller.tenant)
            del raw
            model = self._gateway.model(request.model)
            self._gateway.enter_model(place, caller, request.model)
            model.validator.limits.check_model(request.model)
            if request.WhichOneof("prompt") is None:
                raise InvalidRequestError("prompt: is missing; send text or chat", field="prompt")
            async with self._gateway.counted(caller, model.name):
                answer = self._tokenized(await self._prompt(request, model, caller, None))
                del request
            place.body.hold_answer(len(answer), place.model)
            await self._answer(answer, context, place)

    def _tokenized(self, prompt: ChatPrompt) -> bytes:
        """The answer. While its client does not read it, only its bytes are kept: the list takes 15 times as many."""
        most = self._gateway.config.max_answer_entries
        if (count := len(prompt.tokens)) > most:
            raise refuse(prompt.field, f"{count} tokens; max_answer_entries is {most}", most)
        return pb.TokenizeResponse(token_ids=prompt.tokens).SerializeToString()

    async def ListModels(self, messages: AsyncIterator[bytes], context: Context) -> None:
        caller = caller_of(self._gateway, context)
        with await self._admitted(caller, context) as place:
            await read_message(context, self._gateway.config, place.body)
            await self._gateway.low_priority.step(caller.tenant)
            models = [
                pb.Model(
                    id=name,
                    parent=parent,
                    aliases=() if parent else one.aliases,
                    max_model_len=one.validator.limits.max_model_len,
                    created_unix_seconds=self._gateway.created_unix_seconds,
                    structured_output=not one.grammars.refusal,
                    structured_output_reason=one.grammars.refusal,
                    tool_parser=one.plans.tool_parser,
                    reasoning_parser=one.plans.reasoning_parser,
                    embeds_only=not one.text.has_head,
                    embedding=_embedding(one),
                    embedding_reason=one.text.embedding_refusal,
                )
                for one, name, parent in listed(self._gateway.models)
                if caller.may_name(name)
            ]
            await self._answer(pb.ListModelsResponse(models=models).SerializeToString(), context, place)

    async def _prompt(
        self,
        request: pb.GenerateRequest | pb.TokenizeRequest,
        model: ServedModel,
        caller: Caller,
        asked: RequestedGrammar | None,
    ) -> ChatPrompt:
        """Token ids of a text or a conversation for a model, and how it is answered. The model that a name leads to may
        have changed since the request was read: an adapter's workers unload it."""
        if request.WhichOneof("prompt") == "chat":
            limits = model.validator.limits
            chat = request.chat
            with named_in_chat():
                check_conversation(chat, limits)
                return await self._gateway.converse(
                    lambda: read_conversation(chat, limits),
                    size_of(chat),
                    asked,
                    model=model.name,
                    tenant=caller.tenant,
                    field="chat",
                    answered=isinstance(request, pb.GenerateRequest),
                )
        if asked is not None:
            await model.grammars.check(caller.tenant, asked)
        if isinstance(request, pb.GenerateRequest) and request.WhichOneof("prompt") == "token_ids":
            return ChatPrompt(request.token_ids.ids, AnswerPlan(grammar=asked))
        tokens = await self._gateway.encode(request.text, model=model.name, tenant=caller.tenant)
        return ChatPrompt(tokens, AnswerPlan(grammar=asked))


def _embedding(model: ServedModel) -> pb.ModelEmbedding | None:
    how = model.text.embedding
    if how is None:
        return None
    return pb.ModelEmbedding(
        dimensions=how.dimensions,
        pooling=how.pooling.name.lower(),
        normalised=how.normalised,
        max_tokens=model.validator.longest_input(how)[0],
    )


def _values(context: Context, name: str) -> list[str]:
    metadata: Any = context.invocation_metadata() or ()
    return [value for key, value in metadata if key == name and isinstance(value, str)]


def _options(request: pb.GenerateRequest, limits: FieldLimits) -> GenerationOptions:
    """Lists are passed as they are: the model counts them before anything copies them."""
    return read(GrpcOptions, {field.name: value for field, value in request.options.ListFields()}, limits)


def _envelope(request: pb.GenerateRequest, context: Context, exclusions: Exclusions) -> Envelope:
    return Envelope(
        request_id=request.request_id,
        model=request.model,
        resume_tokens=request.resume_tokens.ids,
        resume_ticket=request.resume_ticket,
        reconnects=request.reconnects,
        explain=request.explain,
        deadline_seconds=context.time_remaining(),
        exclusions=exclusions,
    )


async def _only(response: bytes) -> AsyncGenerator[bytes, None]:
    yield response
