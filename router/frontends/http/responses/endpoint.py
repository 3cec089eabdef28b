"""`POST /v1/responses` and `POST /v1/responses/input_tokens`: one conversation, without state between requests."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

import orjson

from cluster.security.keys import Caller
from router.frontends.field_names import renamed
from router.frontends.http.connection.exchange import Exchange
from router.frontends.http.endpoint import CreatingEndpoint
from router.frontends.http.gate import caller_of
from router.frontends.http.openai.requests import read_request
from router.frontends.http.openai.tokenize import Tokenizing
from router.frontends.http.responses.answer import ResponseForm
from router.frontends.http.responses.request import ResponseRequest
from router.frontends.http.responses.shape import ResponseShape
from router.frontends.http.responses.truncation import MAX_CUTS, Turns
from router.frontends.http.serving import Admit, ParsedRequest, Serving, request_id
from router.observe.traces import Arrival
from router.request.answer_plan import ChatPrompt
from router.request.permissions import check_allowed
from router.request.served_model import ServedModel
from router.request.validator import Envelope
from router.text.conversation import Conversation

# What errors of a conversation and of its options call by a chat's names
_NAMES = {"max_tokens": "max_output_tokens", "messages": "input"}
_PARTS = [
    # A function is no object within its tool here
    (re.compile(r"(tools\[\d+\])\.function\."), r"\1."),
    # The number would be that of the chat's message, which is another than the item's
    (re.compile(r"messages\[\d+\][\w.\[\]]*"), "input"),
]


class Responses(CreatingEndpoint):
    def __init__(self, serving: Serving, tokenizing: Tokenizing):
        super().__init__(serving)
        self._tokenizing = tokenizing

    async def count(self, request: Exchange) -> None:
        await self._tokenizing.answer(request, self._counted)

    async def _counted(self, body: Mapping[str, Any], model: ServedModel, caller: Caller) -> bytes:
        """Count the tokens of the conversation as it was sent: `truncation` shortens none here."""
        limits = model.validator.limits
        options = read_request(ResponseRequest, body, limits)
        with renamed(_NAMES, _PARTS):
            prompt = await self._gateway.converse(
                lambda: options.to_conversation(limits),
                options.size,
                model=model.name,
                tenant=caller.tenant,
                answered=False,
            )
        return orjson.dumps({"object": "response.input_tokens", "input_tokens": len(prompt.tokens)})

    async def _read(
        self, request: Exchange, body: Mapping[str, Any], arrival: Arrival, admit: Admit
    ) -> ParsedRequest:
        gateway, caller = self._gateway, caller_of(request)
        model = gateway.model(body.get("model"))
        options = read_request(ResponseRequest, body, model.validator.limits)
        envelope = Envelope(request_id(request), options.model, options.cache_salt or "")
        with renamed(_NAMES, _PARTS):
            async with gateway.preparing(caller, model.name):
                prompt = await self._prompt(options, model, caller, envelope.cache_salt)
                completion = model.validator.completion(
                    prompt.tokens, options, envelope, prompt.plan, prompt.field
                )
                check_allowed(completion, caller, model.name)
        shape = ResponseShape.of(options, completion, model.text, admin=caller.admin)
        form = ResponseForm(shape)
        echo = len(shape.echo)
        return ParsedRequest(
            [completion], bool(options.stream), form, arrival, echo, kept_whole=shape.logprobs
        )

    async def _prompt(
        self, options: ResponseRequest, model: ServedModel, caller: Caller, cache_salt: str
    ) -> ChatPrompt:
        """Render and tokenise the conversation, shortened where it may be. Raises InvalidRequestError, ContextLengthError,
        and OverloadedError where the quota has no request for the shortened one."""
        gateway = self._gateway
        limits, shortens = model.validator.limits, options.truncation == "auto"
        room = max(1, limits.max_model_len - (options.max_output_tokens or 1))
        turns: Turns | None = None  # as they were rendered
        characters = 0

        async def converse(read: Callable[[], Conversation]) -> ChatPrompt:
            return await gateway.converse(
                read,
                options.size,
                options.asked_grammar,
                model=model.name,
                truncated=shortens,
                tenant=caller.tenant,
                cache_salt=cache_salt,
            )

        def first() -> Conversation:
            nonlocal turns, characters
            given = options.to_conversation(limits)
            if shortens:
                turns, characters = Turns(given), given.characters
            return given

        prompt = await converse(first)
        if turns is None or len(prompt.tokens) <= room:
            return prompt
        lengths = await gateway.lengths(turns.texts, characters, model=model.name, tenant=caller.tenant)
        for _ in range(MAX_CUTS):
            shorter = turns.without_oldest(lengths, len(prompt.tokens), room)
            if shorter is None:
                break
            lengths = [lengths[0], *lengths[1 + len(turns) - len(shorter) :]]
            turns = shorter
            async with gateway.counted(caller, model.name):  # it costs as another request's preparation
                prompt = await converse(turns.conversation)
            if len(prompt.tokens) <= room:
                break
        return prompt
