"""`POST /v1/responses`: one conversation, without state between requests."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from cluster.security.keys import Caller
from router.frontends.http.exchange import Exchange
from router.frontends.http.field_names import renamed
from router.frontends.http.gate import caller_of
from router.frontends.http.requests import read_request
from router.frontends.http.responses.answer import ResponseForm
from router.frontends.http.responses.request import ResponseRequest
from router.frontends.http.responses.shape import ResponseShape
from router.frontends.http.responses.truncation import MAX_CUTS, without_oldest
from router.frontends.http.serving import Admit, ParsedRequest, Serving, request_id
from router.observe.traces import Arrival
from router.request.answer_plan import ChatPrompt
from router.request.permissions import check_allowed
from router.request.validator import Envelope
from router.text.conversation import Conversation

# What errors of a conversation and of its options call by a chat's names
_NAMES = {"max_tokens": "max_output_tokens", "messages": "input", "prompt": "input"}
# A function is no object within its tool here
_PARTS = [(re.compile(r"(tools\[\d+\])\.function\."), r"\1.")]


class Responses:
    def __init__(self, serving: Serving):
        self._serving = serving
        self._gateway = serving.gateway

    async def create(self, request: Exchange) -> None:
        await self._serving.serve(request, self._read)

    async def _read(
        self, request: Exchange, body: Mapping[str, Any], arrival: Arrival, admit: Admit
    ) -> ParsedRequest:
        gateway, caller = self._gateway, caller_of(request)
        model = gateway.model(body.get("model"))
        options = read_request(ResponseRequest, body, model.validator.limits)
        envelope = Envelope(request_id(request), options.model, options.cache_salt or "")
        with renamed(_NAMES, _PARTS):
            async with gateway.preparing(caller, model.name):
                prompt = await self._prompt(options, caller, envelope.cache_salt)
                completion = model.validator.completion(prompt.tokens, options, envelope, prompt.plan)
                check_allowed(completion, caller)
        shape = ResponseShape.of(options, completion, model.text, admin=caller.admin)
        return ParsedRequest([completion], bool(options.stream), ResponseForm(shape), arrival)

    async def _prompt(self, options: ResponseRequest, caller: Caller, cache_salt: str) -> ChatPrompt:
        """Render and tokenise the conversation, shortened where it may be. Raises InvalidRequestError,
        ContextLengthError."""
        model = self._gateway.model(options.model)
        limits, shortens = model.validator.limits, options.truncation == "auto"
        room = max(1, limits.max_model_len - (options.max_output_tokens or 1))
        given: list[Conversation] = []  # as they were rendered

        def read() -> Conversation:
            if given:
                given.append(without_oldest(given[-1], len(prompt.tokens), room))
            else:
                given.append(options.to_conversation(limits))
            return given[-1]

        async def converse() -> ChatPrompt:
            return await self._gateway.converse(
                read,
                options.size,
                options.asked_grammar,
                model=model.name,
                truncated=shortens,
                tenant=caller.tenant,
                cache_salt=cache_salt,
            )

        prompt = await converse()
        for _ in range(MAX_CUTS if shortens else 0):
            if len(prompt.tokens) <= room or (len(given) > 1 and given[-1] is given[-2]):
                break
            prompt = await converse()
        return prompt
