"""`/v1/embeddings`: one vector for each input, in OpenAI's shape."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import orjson
from pydantic import Field

from router.frontends.embeddings import Vectors, named, read_inputs, usage_of
from router.frontends.http.connection.exchange import Exchange
from router.frontends.http.connection.long_body import Lists
from router.frontends.http.endpoint import CreatingEndpoint
from router.frontends.http.gate import caller_of
from router.frontends.http.openai.neutral_fields import Ignored
from router.frontends.http.openai.requests import (
    CLOSED,
    MODEL_DESCRIPTION,
    AskedPriority,
    CacheSalt,
    ModelName,
    Prompts,
    read_request,
)
from router.frontends.http.openai.shapes import baton
from router.frontends.http.serving import Admit, ParsedRequest, StreamedAnswer, request_id
from router.observe.traces import Arrival
from router.request.completion import Delta, Outcome
from router.request.embedding_options import EmbeddingOptions
from router.request.validator import Envelope


class EmbeddingRequest(EmbeddingOptions):
    model_config = CLOSED

    model: ModelName = Field("", description=MODEL_DESCRIPTION)
    input: Prompts = Field(description="text, token ids, or several of either")
    encoding_format: Literal["float", "base64"] | None = Field(
        None, description="base64: of float32, little-endian"
    )
    priority: AskedPriority = None
    cache_salt: CacheSalt = None
    user: Ignored = None


class Embeddings(CreatingEndpoint):
    async def _read(
        self, request: Exchange, body: Mapping[str, Any], arrival: Arrival, admit: Admit
    ) -> ParsedRequest:
        model = self._gateway.model(body.get("model"))
        options = read_request(EmbeddingRequest, body, model.validator.limits)
        caller = caller_of(request)
        envelope = Envelope(
            request_id(request), options.model, options.cache_salt or "", prompts=len(options.input)
        )
        completions, vectors = await read_inputs(
            self._gateway,
            model,
            named("input", options.input),
            options,
            envelope,
            caller,
            admit=lambda further: admit(further, 0),
            next_turn=lambda: self._serving.start_turn(request, model.name),
        )
        form = EmbeddingsForm(
            completions[0].model, vectors, base64=options.encoding_format == "base64", admin=caller.admin
        )
        return ParsedRequest(completions, False, form, arrival, dimensions=vectors.dimensions)


def usage_shown(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    used = usage_of(outcomes)
    return {
        "prompt_tokens": used.prompt_tokens,
        "total_tokens": used.prompt_tokens,
        "prompt_tokens_details": {"cached_tokens": used.cached_tokens},
    }


class EmbeddingsForm:
    """The form of an answer with vectors."""

    def __init__(self, model: str, vectors: Vectors, *, base64: bool, admin: bool):
        """`base64`: of the vectors' bytes, else lists of numbers."""
        self._model, self._vectors, self._base64, self._admin = model, vectors, base64, admin

    def whole(self, choices: int) -> EmbeddingsAnswer:
        return EmbeddingsAnswer(self, choices)

    def streamed(self, choices: int) -> StreamedAnswer:
        raise TypeError("embeddings are not streamed")

    def entry(self, index: int, sent: bytes) -> bytes:
        """One entry of `data`, as JSON."""
        vector = self._vectors.of(sent)
        shown = base64.b64encode(vector.tobytes()).decode() if self._base64 else vector
        return orjson.dumps(
            {"object": "embedding", "index": index, "embedding": shown}, option=orjson.OPT_SERIALIZE_NUMPY
        )

    def encode(self, entries: Sequence[bytes], outcomes: Sequence[Outcome]) -> list[bytes]:
        """The answer's JSON, in pieces."""
        lists = Lists()
        data, usage = lists.add(entries), usage_shown(outcomes)
        shown = {"object": "list", "data": data, "model": self._model, "usage": usage}
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
