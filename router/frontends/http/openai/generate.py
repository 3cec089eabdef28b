"""`/v1/completions` and `/v1/chat/completions`."""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from starlette.requests import Request

from cluster.security.keys import Caller
from router.frontends.exclusions import read_exclusions
from router.frontends.http.answer_size import TOKEN_BYTES, TOKEN_ID_BYTES
from router.frontends.http.connection.exchange import Exchange
from router.frontends.http.gate import caller_of
from router.frontends.http.openai.echo import EchoForm
from router.frontends.http.openai.events import Events
from router.frontends.http.openai.parts import WHOLE_VIEW, ChatView
from router.frontends.http.openai.requests import (
    ChatCompletionRequest,
    CompletionRequest,
    HttpRequest,
    StreamOptions,
    read_request,
)
from router.frontends.http.openai.shapes import (
    ChatShape,
    CompletionShape,
    PromptIds,
    PromptShown,
    Shape,
    WholeShape,
)
from router.frontends.http.serving import Admit, ParsedRequest, Serving, request_id
from router.observe.traces import Arrival
from router.request.answer_plan import AnswerPlan, ChatPrompt
from router.request.fields import numbered
from router.request.permissions import check_allowed
from router.request.served_model import ServedModel
from router.request.validator import Envelope
from router.text.token_bytes import TextOffsets


class Generate:
    def __init__(self, serving: Serving):
        self._serving = serving
        self._gateway = serving.gateway

    async def chat(self, request: Exchange) -> None:
        await self._serving.serve(request, self._read_chat)

    async def completion(self, request: Exchange) -> None:
        await self._serving.serve(request, self._read_completion)

    async def _read_chat(
        self, request: Exchange, body: Mapping[str, Any], arrival: Arrival, admit: Admit
    ) -> ParsedRequest:
        model, caller = self._gateway.model(body.get("model")), caller_of(request)
        limits = model.validator.limits
        options = read_request(ChatCompletionRequest, body, limits)
        envelope = _envelope(request, options, 1)
        async with self._gateway.preparing(caller, model.name):
            prompt = await self._gateway.converse(
                lambda: options.conversation(limits),
                options.size,
                options.asked_grammar,
                model=model.name,
                truncated=options.truncates,
                tenant=caller.tenant,
                cache_salt=envelope.cache_salt,
            )
            exclusions = await read_exclusions(self._gateway, model, options, caller.tenant)
            envelope = replace(envelope, exclusions=exclusions)
            view = ChatView(options.include_reasoning is not False, options.names_tool)
            return self._parsed(ChatShape, model, caller, options, [prompt], envelope, arrival, view)

    async def _read_completion(
        self, request: Exchange, body: Mapping[str, Any], arrival: Arrival, admit: Admit
    ) -> ParsedRequest:
        model = self._gateway.model(body.get("model"))
        options = read_request(CompletionRequest, body, model.validator.limits)
        caller, envelope = caller_of(request), _envelope(request, options, len(options.prompt))
        # Before tokenising: a request that gets no place costs nothing of the quota.
        admit(len(options.prompt) - 1, _echoed_bytes(options))
        async with self._gateway.preparing(caller, model.name):
            if (asked := options.asked_grammar) is not None:
                await model.grammars.check(caller.tenant, asked)
            exclusions = await read_exclusions(self._gateway, model, options, caller.tenant)
            envelope = replace(envelope, exclusions=exclusions)
            encode = partial(
                self._gateway.encode,
                model=model.name,
                truncated=options.truncates,
                tenant=caller.tenant,
                cache_salt=envelope.cache_salt,
            )
            prompts: list[ChatPrompt] = []
            for index, one in enumerate(options.prompt):
                if prompts:
                    await self._serving.start_turn(request, model.name)
                field = numbered("prompt", index, len(options.prompt))
                tokens = await encode(one, field=field) if isinstance(one, str) else one
                prompts.append(ChatPrompt(tokens, AnswerPlan(grammar=asked), field))
            parsed = self._parsed(CompletionShape, model, caller, options, prompts, envelope, arrival)
            if not options.echoes:
                return parsed
            texts = await self._echoed(model, caller, options, parsed)
            assert isinstance(parsed.form, ShapeForm)
            parsed.form.count_from_prompts(texts, parsed.completions[0].n)
            shown = sum(len(text.encode()) for text in texts)
            form = EchoForm(parsed.form, parsed.completions, texts)
            return replace(parsed, form=form, echo_bytes=parsed.echo_bytes + shown)

    async def _echoed(
        self, model: ServedModel, caller: Caller, options: CompletionRequest, parsed: ParsedRequest
    ) -> list[str]:
        """The prompts' texts. Those that are whole texts are shown as they came."""
        return [
            given
            if isinstance(given, str) and not options.truncates
            else await self._gateway.decode(one.prompt_tokens, model=model.name, tenant=caller.tenant)
            for given, one in zip(options.prompt, parsed.completions, strict=True)
        ]

    def _parsed(
        self,
        kind: type[Shape],
        model: ServedModel,
        caller: Caller,
        options: HttpRequest,
        prompts: Sequence[ChatPrompt],
        envelope: Envelope,
        arrival: Arrival,
        view: ChatView = WHOLE_VIEW,
    ) -> ParsedRequest:
        validator = model.validator
        context = validator.limits.max_model_len
        completions = [
            validator.completion(options.kept(one.tokens, context), options, envelope, one.plan, one.field)
            for one in prompts
        ]
        check_allowed(completions[0], caller, model.name)
        prompt_tokens = sum(len(one.prompt_tokens) for one in completions)
        ids = None
        if options.return_token_ids:
            ids = PromptIds([one.prompt_tokens for one in completions], completions[0].n)
        shape = kind(
            completions[0],
            model.text,
            int(time.time()),
            kind.id_prefix + secrets.token_hex(12),
            bool(options.return_token_ids),
            caller.admin,
            view,
            PromptShown(options.echoes, options.prompt_logprobs, ids),
        )
        form = ShapeForm(shape, options.stream_options or StreamOptions(), prompt_tokens)
        repeated = TOKEN_ID_BYTES * prompt_tokens if ids is not None else 0
        return ParsedRequest(completions, bool(options.stream), form, arrival, repeated)


class ShapeForm:
    """The form of an answer with choices."""

    def __init__(self, shape: Shape, usage: StreamOptions, prompt_tokens: int):
        self._shape = shape
        self._usage = usage
        self._prompt_tokens = prompt_tokens

    def count_from_prompts(self, texts: Sequence[str], n: int) -> None:
        """Text offsets begin with the prompts, each of which n choices show."""
        shape = self._shape
        if isinstance(shape, CompletionShape) and shape.completion.sampling.logprobs:
            for index in range(len(texts) * n):
                shape.offsets[index] = TextOffsets(shape.text.pieces, texts[index // n])

    def whole(self, choices: int) -> WholeShape:
        return WholeShape(self._shape, choices)

    def streamed(self, choices: int) -> Events:
        return Events(self._shape, choices, self._usage, self._prompt_tokens)


def _echoed_bytes(options: CompletionRequest) -> int:
    """About the bytes of the prompts' texts in all choices of a whole answer: tokens are not decoded yet."""
    if options.stream or not options.echoes:
        return 0
    sizes = (len(one) * (1 if isinstance(one, str) else TOKEN_BYTES) for one in options.prompt)
    return sum(sizes) * (options.n or 1)


def _envelope(request: Request, options: HttpRequest, prompts: int) -> Envelope:
    return Envelope(request_id(request), options.model, options.cache_salt or "", prompts=prompts)
