"""`POST /v1/responses`: one conversation, without state between requests."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from starlette.responses import Response

from cluster.security.keys import Caller
from router.frontends.http.exchange import Exchange
from router.frontends.http.field_names import renamed
from router.frontends.http.gate import caller_of
from router.frontends.http.requests import read_request
from router.frontends.http.responses.answer import ResponseForm
from router.frontends.http.responses.input_items import ChatMessage, items_size, read_items
from router.frontends.http.responses.request import ResponseRequest
from router.frontends.http.responses.shape import ResponseShape
from router.frontends.http.responses.truncation import MAX_CUTS, without_oldest
from router.frontends.http.serving import Admit, ParsedRequest, Serving, request_id
from router.observe.traces import Arrival
from router.request.permissions import check_allowed
from router.request.validator import Envelope

# What errors of a conversation and of its options call by a chat's names
_NAMES = {"max_tokens": "max_output_tokens", "messages": "input", "prompt": "input"}


class Responses:
    def __init__(self, serving: Serving):
        self._serving = serving
        self._gateway = serving.gateway

    async def create(self, request: Exchange) -> Response | None:
        return await self._serving.serve(request, self._read)

    async def _read(
        self, request: Exchange, body: Mapping[str, Any], arrival: Arrival, admit: Admit
    ) -> ParsedRequest:
        gateway, caller = self._gateway, caller_of(request)
        options = read_request(ResponseRequest, body, gateway.validator.limits)
        envelope = Envelope(request_id(request), options.cache_salt or "")
        with renamed(_NAMES):
            async with gateway.preparing(caller):
                if (asked := options.asked_grammar) is not None:
                    await gateway.grammars.check(asked, caller.tenant)
                prompt = await self._prompt(options, caller, envelope.cache_salt)
                completion = gateway.validator.completion(prompt, options, envelope)
                check_allowed(completion, caller)
        shape = ResponseShape.of(options, completion, gateway.text, admin=caller.admin)
        return ParsedRequest([completion], bool(options.stream), ResponseForm(shape), arrival)

    async def _prompt(self, options: ResponseRequest, caller: Caller, cache_salt: str) -> list[int]:
        """Render and tokenise the input, shortened if it is to be. Raises InvalidRequestError, ContextLengthError."""
        limits, truncates = self._gateway.validator.limits, options.truncation == "auto"
        room = limits.max_model_len - (options.max_output_tokens or 1)
        messages: list[ChatMessage] = []

        def read() -> list[ChatMessage]:
            messages[:] = read_items(options.input, options.instructions, limits)
            return messages

        size = items_size(options.input, options.instructions)
        prompt = await self._tokens(read, size, options, caller, cache_salt)
        for _ in range(MAX_CUTS):
            if not truncates or len(prompt) <= room or room <= 0:
                break
            shorter = without_oldest(messages, len(prompt), room)
            if shorter is None:
                break
            messages[:] = shorter
            prompt = await self._tokens(lambda: messages, size, options, caller, cache_salt)
        return prompt

    async def _tokens(
        self,
        read: Callable[[], list[ChatMessage]],
        size: int,
        options: ResponseRequest,
        caller: Caller,
        cache_salt: str,
    ) -> list[int]:
        truncates = options.truncation == "auto"
        rendered = await self._gateway.render(
            read, size, options.reasoning_effort, truncated=truncates, tenant=caller.tenant
        )
        return await self._gateway.encode(
            rendered, special=False, truncated=truncates, tenant=caller.tenant, cache_salt=cache_salt
        )
