"""`/v1/embeddings`: one vector for each input, in OpenAI's shape."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

import numpy as np
import orjson
from pydantic import Field

from cluster.protocol.pooling import Embedding
from router.frontends.http.exchange import Exchange
from router.frontends.http.field_names import renamed
from router.frontends.http.gate import caller_of
from router.frontends.http.long_body import Lists
from router.frontends.http.requests import (
    CLOSED,
    MODEL_DESCRIPTION,
    AskedPriority,
    CacheSalt,
    Ignored,
    ModelName,
    Prompts,
    TruncatePromptTokens,
    read_request,
)
from router.frontends.http.serving import Admit, ParsedRequest, Serving, StreamedAnswer, request_id
from router.frontends.http.shapes import baton
from router.observe.traces import Arrival
from router.request.completion import Completion, Delta, Outcome
from router.request.fields import RequestModel, Within, refuse
from router.request.options import Flag
from router.request.permissions import check_allowed
from router.request.served_model import ServedModel
from router.request.validator import Envelope

_FIELDS = {"prompt": "input"}  # texts are checked as those of completions
_LEAST_LENGTH = 1e-12  # by which torch's normalisation divides at least


class EmbeddingRequest(RequestModel):
    model_config = CLOSED

    truncate_prompt_tokens: TruncatePromptTokens = Field(
        None, description="of each input; -1: as many as the model takes"
    )
    truncation_side: Literal["left", "right"] | None = Field(
        None, description="where tokens are left out; default: left, the input's end is kept"
    )
    model: ModelName = Field("", description=MODEL_DESCRIPTION)
    input: Prompts = Field(description="text, token ids, or several of either")
    encoding_format: Literal["float", "base64"] | None = Field(
        None, description="base64: of float32, little-endian"
    )
    dimensions: Annotated[int, Within(1, 2**31 - 1)] | None = Field(
        None, description="of shorter vectors, where the checkpoint declares them (Matryoshka)"
    )
    add_special_tokens: Flag = Field(None, description="default: true")
    priority: AskedPriority = Field(None, json_schema_extra={"description": {"$limit": "priority_signs"}})
    cache_salt: CacheSalt = Field(
        None, description="cached prefixes are shared only among the tenant's requests with the same salt"
    )
    user: Ignored = None

    def kept(self, tokens: Sequence[int], longest: int) -> Sequence[int]:
        """The tokens of one input that `truncate_prompt_tokens` leaves."""
        count = longest if self.truncate_prompt_tokens == -1 else self.truncate_prompt_tokens
        if count is None:
            return tokens
        return tokens[:count] if self.truncation_side == "right" else tokens[-count:]


class Embeddings:
    def __init__(self, serving: Serving):
        self._serving = serving
        self._gateway = serving.gateway

    async def create(self, request: Exchange) -> None:
        await self._serving.serve(request, self._read)

    async def _read(
        self, request: Exchange, body: Mapping[str, Any], arrival: Arrival, admit: Admit
    ) -> ParsedRequest:
        model = self._gateway.model(body.get("model"))
        options = read_request(EmbeddingRequest, body, model.validator.limits)
        how, caller = model.embedding, caller_of(request)
        dimensions = _dimensions(options.dimensions, how)
        model.validator.check_embeddings(len(options.input), how)
        envelope = Envelope(
            request_id(request), options.model, options.cache_salt or "", prompts=len(options.input)
        )
        # Before tokenising: a request that gets no place costs nothing of the quota.
        admit(len(options.input) - 1)
        completions = []
        async with self._gateway.preparing(caller, model.name):
            for one in options.input:
                if completions:
                    await self._serving.start_turn(request, model.name)
                tokens = await self._tokens(model, one, options, caller.tenant)
                completions.append(model.validator.embedding(tokens, how, envelope, options.priority or 0))
            check_allowed(completions[0], caller)
        form = EmbeddingsForm(
            completions, how, dimensions, base64=options.encoding_format == "base64", admin=caller.admin
        )
        return ParsedRequest(completions, False, form, arrival)

    async def _tokens(
        self, model: ServedModel, given: str | list[int], options: EmbeddingRequest, tenant: str
    ) -> Sequence[int]:
        tokens = given
        if isinstance(tokens, str):
            with renamed(_FIELDS, ()):
                tokens = await self._gateway.encode(
                    tokens,
                    model=model.name,
                    special=options.add_special_tokens is not False,
                    truncated=options.truncate_prompt_tokens is not None,
                    tenant=tenant,
                    cache_salt=options.cache_salt or "",
                )
        return options.kept(tokens, model.validator.longest_input(model.embedding)[0])


def _dimensions(asked: int | None, how: Embedding) -> int:
    """Raises InvalidRequestError unless the model was trained for vectors of that length."""
    if asked is None or asked == how.dimensions:
        return how.dimensions
    if how.shorter is None:
        text = f"this model's vectors have {how.dimensions}; its checkpoint declares no shorter ones"
        raise refuse("dimensions", text, how.dimensions)
    if asked > how.dimensions:
        raise refuse("dimensions", f"this model's vectors have {how.dimensions}", how.dimensions)
    if how.shorter and asked not in how.shorter:
        allowed = ", ".join(map(str, how.shorter))
        raise refuse("dimensions", f"this model's checkpoint allows {allowed[:200]}", allowed[:200])
    return asked


class EmbeddingsForm:
    """The form of an answer with vectors."""

    def __init__(
        self,
        completions: Sequence[Completion],
        how: Embedding,
        dimensions: int,
        *,
        base64: bool,
        admin: bool,
    ):
        """`base64`: of the vectors' bytes, else lists of numbers."""
        self._model = completions[0].model
        self._how, self._dimensions, self._base64, self._admin = how, dimensions, base64, admin

    def whole(self, choices: int) -> EmbeddingsAnswer:
        return EmbeddingsAnswer(self, choices)

    def streamed(self, choices: int) -> StreamedAnswer:
        raise TypeError("embeddings are not streamed")

    def vector(self, sent: bytes) -> np.ndarray[Any, np.dtype[np.float32]]:
        """float32 [dimensions] of the bytes that a worker sent: cut, and then normalised if the checkpoint says so."""
        made = np.frombuffer(sent, dtype="<f4")[: self._dimensions]
        if self._how.normalised:
            made = made / max(float(np.linalg.norm(made.astype(np.float64))), _LEAST_LENGTH)
        return np.ascontiguousarray(made, dtype="<f4")

    def entry(self, index: int, sent: bytes) -> bytes:
        """One entry of `data`, as JSON."""
        vector = self.vector(sent)
        shown = base64.b64encode(vector.tobytes()).decode() if self._base64 else vector
        return orjson.dumps(
            {"object": "embedding", "index": index, "embedding": shown}, option=orjson.OPT_SERIALIZE_NUMPY
        )

    def encode(self, entries: Sequence[bytes], outcomes: Sequence[Outcome]) -> list[bytes]:
        """The answer's JSON, in pieces."""
        tokens = sum(outcome.usage.prompt_tokens for outcome in outcomes)
        cached = sum(outcome.usage.cached_tokens for outcome in outcomes)
        usage = {
            "prompt_tokens": tokens,
            "total_tokens": tokens,
            "prompt_tokens_details": {"cached_tokens": cached},
        }
        lists = Lists()
        shown = {"object": "list", "data": lists.add(entries), "model": self._model, "usage": usage}
        return lists.encode({**shown, "baton": baton(outcomes[-1], admin=self._admin)})


class EmbeddingsAnswer:
    """Collects the vectors of all inputs, each encoded as it comes."""

    def __init__(self, form: EmbeddingsForm, inputs: int):
        self._form = form
        self._entries = [b""] * inputs

    def add(self, deltas: Sequence[Delta]) -> None:
        for delta in deltas:
            for token in delta.prompt:
                self._entries[delta.choice] = self._form.entry(delta.choice, token.embedding)

    def body(self, outcomes: Sequence[Outcome]) -> Sequence[bytes]:
        return self._form.encode(self._entries, outcomes)
