"""`/tokenize` and `/detokenize`, in vLLM's shapes.

Tokenising costs as much as the preparation of a generation, so these requests take places and count as requests of the
tenant's quota.
"""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from typing import Annotated, Any, TypeAlias

import orjson
from pydantic import Field, PlainValidator, ValidationInfo
from pydantic.json_schema import WithJsonSchema
from starlette.responses import Response

from cluster.security.keys import Caller
from router.frontends.http.connection.body import read_json
from router.frontends.http.connection.exchange import Exchange
from router.frontends.http.gate import caller_of
from router.frontends.http.openai.requests import (
    CLOSED,
    MODEL_DESCRIPTION,
    ChatCompletionRequest,
    ModelName,
    read_request,
)
from router.frontends.http.serving import Serving, request_id
from router.request.answer_plan import ChatPrompt
from router.request.fields import RequestModel, late, limits_of, refuse, wrong
from router.request.options import Flag, TokenId
from router.request.served_model import ServedModel

# Makes the body of the answer. Raises BatonError.
Answer: TypeAlias = Callable[[Mapping[str, Any], ServedModel, Caller], Awaitable[bytes]]


def _tokens(value: object, info: ValidationInfo) -> list[int]:
    limits = limits_of(info)
    if not isinstance(value, list):
        raise wrong("must be a list of token ids")
    if len(value) > limits.max_model_len:
        raise wrong(f"at most {limits.max_model_len} entries are allowed", limits.max_model_len)
    if not set(map(type, value)) <= {int} or (
        value and not 0 <= min(value) <= max(value) <= limits.last_token
    ):
        raise wrong(f"token ids must lie in 0 … {limits.last_token}", limits.last_token)
    return value


def _absent(value: object) -> None:
    if value is not None:
        raise wrong("not with messages: send one of the two")


# vLLM's clients write out the one that they do not use
_Absent: TypeAlias = Annotated[None, PlainValidator(_absent), WithJsonSchema({"type": "null"})]


class TokenizeRequest(RequestModel):
    model_config = CLOSED

    model: ModelName = Field("", description=MODEL_DESCRIPTION)
    prompt: str
    messages: _Absent = None
    add_special_tokens: Flag = Field(None, description="default: true")
    return_token_strs: Flag = None


class TokenizeChatRequest(ChatCompletionRequest):
    """Fields that do not change a chat's prompt are checked, and change nothing."""

    prompt: _Absent = None
    return_token_strs: Flag = None


class DetokenizeRequest(RequestModel):
    model_config = CLOSED

    model: ModelName = Field("", description=MODEL_DESCRIPTION)
    tokens: Annotated[
        list[int], PlainValidator(_tokens, Annotated[list[TokenId], late(maxItems="max_model_len")])
    ]


class Tokenizing:
    """Answers requests that only need the tokenizer."""

    def __init__(self, serving: Serving):
        self._serving = serving
        self._gateway = serving.gateway

    async def answer(self, request: Exchange, answer: Answer) -> None:
        """Returns once the client has read the answer, as Serving.serve. Raises BatonError before it has begun."""
        gateway, caller = self._gateway, caller_of(request)
        with contextlib.ExitStack() as held:
            place = await self._serving.admit(held, request)
            body = await read_json(
                request,
                gateway.config,
                place.body,
                gateway.low_priority,
                lambda raw: self._serving.turn_to_parse(request, place, raw),
            )
            model = gateway.model(asked := body.get("model"))
            gateway.enter_model(place, caller, asked)
            if isinstance(asked, str):
                model.validator.limits.check_model(asked)  # else another model's limits would count it
            asked_id = request_id(request)
            async with gateway.counted(caller, model.name):
                made = await answer(body, model, caller)
            shown = {"x-request-id": request.headers["x-request-id"]} if asked_id else {}
            del body
            response = Response(made, media_type="application/json", headers=shown)
            await self._serving.deliver(request, response, place)

    async def tokenize(self, request: Exchange) -> None:
        await self.answer(request, self._tokens)

    async def detokenize(self, request: Exchange) -> None:
        await self.answer(request, self._text)

    async def _tokens(self, body: Mapping[str, Any], model: ServedModel, caller: Caller) -> bytes:
        is_chat = body.get("messages") is not None or (body.get("prompt") is None and "messages" in body)
        read = self._of_chat if is_chat else self._of_text
        prompt, strings = await read(body, model, caller)
        tokens = prompt.tokens
        most = self._gateway.config.max_answer_entries
        if len(tokens) > most:
            raise refuse(prompt.field, f"{len(tokens)} tokens; max_answer_entries is {most}", most)
        made = {"count": len(tokens), "max_model_len": model.validator.limits.max_model_len, "tokens": tokens}
        names = await model.text.names(tokens, tenant=caller.tenant) if strings else None
        return orjson.dumps({**made, "token_strs": names})

    async def _of_text(
        self, body: Mapping[str, Any], model: ServedModel, caller: Caller
    ) -> tuple[ChatPrompt, bool]:
        options = read_request(TokenizeRequest, body, model.validator.limits)
        special = options.add_special_tokens is not False
        tokens = await self._gateway.encode(
            options.prompt, model=model.name, special=special, tenant=caller.tenant
        )
        return ChatPrompt(tokens), bool(options.return_token_strs)

    async def _of_chat(
        self, body: Mapping[str, Any], model: ServedModel, caller: Caller
    ) -> tuple[ChatPrompt, bool]:
        limits = model.validator.limits
        options = read_request(TokenizeChatRequest, body, limits)
        prompt = await self._gateway.converse(
            lambda: options.conversation(limits),
            options.size,
            model=model.name,
            truncated=options.truncates,
            tenant=caller.tenant,
            answered=False,
        )
        kept = options.kept(prompt.tokens, limits.max_model_len)
        return replace(prompt, tokens=kept), bool(options.return_token_strs)

    async def _text(self, body: Mapping[str, Any], model: ServedModel, caller: Caller) -> bytes:
        options = read_request(DetokenizeRequest, body, model.validator.limits)
        text = await self._gateway.decode(
            options.tokens, model=model.name, tenant=caller.tenant, field="tokens"
        )
        return orjson.dumps({"prompt": text})
