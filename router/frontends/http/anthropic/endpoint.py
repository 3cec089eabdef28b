"""`POST /v1/messages` and `POST /v1/messages/count_tokens`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import orjson
from starlette.responses import Response

from cluster.security.keys import Caller
from router.frontends.field_names import renamed
from router.frontends.http.anthropic.answer import MessageForm
from router.frontends.http.anthropic.blocks import WrittenInputs
from router.frontends.http.anthropic.errors import messages_error_response, new_request_id
from router.frontends.http.anthropic.request import (
    ConversationFields,
    CountTokensRequest,
    MessagesRequest,
)
from router.frontends.http.connection.body import KeptBody
from router.frontends.http.connection.exchange import Exchange
from router.frontends.http.errors import error_headers, typed
from router.frontends.http.gate import caller_of
from router.frontends.http.openai.requests import read_request
from router.frontends.http.openai.tokenize import Tokenizing
from router.frontends.http.serving import Admit, ParsedRequest, Reader, Serving, request_id
from router.observe.traces import Arrival
from router.request.answer_plan import ChatPrompt
from router.request.grammar.requested import RequestedGrammar
from router.request.permissions import check_allowed
from router.request.served_model import ServedModel
from router.request.validator import MAX_REQUEST_ID, Envelope

# What errors of a conversation and of its options call by a chat's names
_NAMES = {"stop": "stop_sequences", "continue_final_message": "messages"}
_PARTS = [
    (re.compile(r"tools\[(\d+)\]\.function\.parameters"), r"tools.\1.input_schema"),
    (re.compile(r"tools\[(\d+)\](?:\.function)?"), r"tools.\1"),
    # The number would be that of the chat's message, which is another than the client's
    (re.compile(r"messages\[\d+\][\w.\[\]]*"), "messages"),
]


class Messages:
    def __init__(self, serving: Serving, tokenizing: Tokenizing):
        self._serving = serving
        self._tokenizing = tokenizing
        self._gateway = serving.gateway

    async def create(self, request: Exchange) -> Response | None:
        shown_id = _show_id(request)
        try:
            await self._serving.serve(request, self._reader(shown_id))
        except Exception as error:
            return _failure(error, request, shown_id)
        return None

    async def count_tokens(self, request: Exchange) -> Response | None:
        shown_id = _show_id(request)
        try:
            await self._tokenizing.answer(request, self._counted)
        except Exception as error:
            return _failure(error, request, shown_id)
        return None

    def _reader(self, shown_id: str) -> Reader:
        async def read(
            request: Exchange, body: Mapping[str, Any], arrival: Arrival, admit: Admit
        ) -> ParsedRequest:
            gateway, caller = self._gateway, caller_of(request)
            model = gateway.model(body.get("model"))
            options = read_request(MessagesRequest, body, model.validator.limits)
            envelope = Envelope(request_id(request) or shown_id, options.model, options.cache_salt or "")
            with renamed(_NAMES, _PARTS):
                async with gateway.preparing(caller, model.name):
                    asked = options.asked_grammar
                    prompt = await self._prompt(options, body, model, asked, caller, envelope.cache_salt)
                    room = model.validator.limits.max_model_len - len(prompt.tokens)
                    if fills := 0 < room < options.max_tokens:
                        options = options.filling_context()
                    completion = model.validator.completion(
                        prompt.tokens, options, envelope, prompt.plan, prompt.field
                    )
                    check_allowed(completion, caller, model.name)
            form = MessageForm(completion, shown_id, options.omits_thinking, fills, caller.admin)
            return ParsedRequest([completion], bool(options.stream), form, arrival)

        return read

    async def _counted(self, body: Mapping[str, Any], model: ServedModel, caller: Caller) -> bytes:
        options = read_request(CountTokensRequest, body, model.validator.limits)
        with renamed(_NAMES, _PARTS):
            prompt = await self._prompt(options, body, model, None, caller, "", answered=False)
        return orjson.dumps({"input_tokens": len(prompt.tokens)})

    async def _prompt(
        self,
        options: ConversationFields,
        body: Mapping[str, Any],
        model: ServedModel,
        asked: RequestedGrammar | None,
        caller: Caller,
        cache_salt: str,
        *,
        answered: bool = True,
    ) -> ChatPrompt:
        """Render and tokenise the conversation. `answered`: as of `converse`. Raises InvalidRequestError,
        ContextLengthError."""
        limits = model.validator.limits
        text = body.text if isinstance(body, KeptBody) else b""
        return await self._gateway.converse(
            lambda: options.conversation(limits, WrittenInputs(text)),
            options.size + len(text),  # a long one is not parsed again on the event loop
            asked,
            model=model.name,
            tenant=caller.tenant,
            cache_salt=cache_salt,
            answered=answered,
        )


def _show_id(request: Exchange) -> str:
    """Every answer has a `request-id`, which an error's body repeats."""
    shown_id = request.headers.get("x-request-id", "")[:MAX_REQUEST_ID] or new_request_id()
    request.add_headers(((b"request-id", shown_id.encode("latin-1")),))
    return shown_id


def _failure(error: Exception, request: Exchange, shown_id: str) -> Response:
    known = typed(error, request.url.path)
    return messages_error_response(known, error_headers(known), shown_id)
