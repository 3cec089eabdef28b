"""`/score` and `/rerank`, in vLLM's shapes for models that make embeddings: how similar those of two texts are."""

from __future__ import annotations

import secrets
import time
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Annotated, Any, TypeAlias

import numpy as np
import numpy.typing as npt
from pydantic import Field, PlainValidator, ValidationInfo

from router.frontends.embeddings import NamedInput, named, read_inputs
from router.frontends.http.connection.exchange import Exchange
from router.frontends.http.connection.long_body import Lists
from router.frontends.http.endpoint import CreatingEndpoint
from router.frontends.http.gate import caller_of
from router.frontends.http.openai.embeddings import usage_shown
from router.frontends.http.openai.neutral_fields import Ignored
from router.frontends.http.openai.requests import (
    CLOSED,
    MODEL_DESCRIPTION,
    AskedPriority,
    CacheSalt,
    ModelName,
    read_request,
)
from router.frontends.http.openai.shapes import baton
from router.frontends.http.serving import Admit, ParsedRequest, Serving, StreamedAnswer, request_id
from router.observe.traces import Arrival
from router.request.completion import Delta, Outcome
from router.request.embedding_options import InputOptions
from router.request.fields import OnlyNeutral, Within, late, limits_of, refuse, wrong
from router.request.options import Flag
from router.request.validator import Envelope

_MIN_PRODUCT = 1e-8  # of two lengths, by which torch's similarity divides at least
# The fields of an answer that show its scores
Shown: TypeAlias = Callable[[Lists, Sequence[float]], dict[str, Any]]


def _texts(value: object, info: ValidationInfo) -> list[str]:
    most = limits_of(info).settings.max_prompts
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list) or not texts:
        raise wrong("must be text or a list of texts")
    if len(texts) > most:
        raise wrong(f"at most {most} at once (max_prompts)", most)
    if set(map(type, texts)) != {str}:
        raise wrong("a list must hold texts")
    return texts


_Several: TypeAlias = Annotated[list[str], late(minItems=1, maxItems="max_prompts")]
Texts: TypeAlias = Annotated[list[str], PlainValidator(_texts, str | _Several)]


class ComparedTexts(InputOptions):
    model_config = CLOSED

    model: ModelName = Field("", description=MODEL_DESCRIPTION)
    priority: AskedPriority = None
    cache_salt: CacheSalt = None
    user: Ignored = None
    # Of classifiers
    activation: Ignored = None
    softmax: Ignored = None
    use_activation: Ignored = None
    mm_processor_kwargs: Annotated[Any, OnlyNeutral()] = None

    @property
    @abstractmethod
    def sides(self) -> tuple[list[NamedInput], list[NamedInput]]:
        """The texts, each on the left with the one on the right or the only one with all. Raises InvalidRequestError."""

    @property
    @abstractmethod
    def shown(self) -> Shown: ...

    @property
    def repeated_bytes(self) -> int:
        """Of the texts that the answer repeats."""
        return 0


class ScoreRequest(ComparedTexts):
    text_1: Texts = Field(
        description="one text, which is compared with each of text_2, or as many as text_2 has"
    )
    text_2: Texts

    @property
    def sides(self) -> tuple[list[NamedInput], list[NamedInput]]:
        if len(self.text_1) not in (1, len(self.text_2)):
            raise refuse("text_2", "must have as many texts as text_1, unless that is one text")
        return named("text_1", self.text_1), named("text_2", self.text_2)

    @property
    def shown(self) -> Shown:
        return _scored


class RerankRequest(ComparedTexts):
    query: str
    documents: Texts
    top_n: Annotated[int, Within(-(2**31), 2**31 - 1)] | None = Field(None, description="0 and less = all")
    return_documents: Flag = Field(None, description="false: results have no document")

    @property
    def sides(self) -> tuple[list[NamedInput], list[NamedInput]]:
        return named("query", [self.query]), named("documents", self.documents)

    @property
    def shown(self) -> Shown:
        documents = None if self.return_documents is False else self.documents
        return partial(_ranked, documents, self.top_n or 0)

    @property
    def repeated_bytes(self) -> int:
        return 0 if self.return_documents is False else sum(len(one.encode()) for one in self.documents)


def _scored(_: Lists, scores: Sequence[float]) -> dict[str, Any]:
    data = [{"index": index, "object": "score", "score": score} for index, score in enumerate(scores)]
    return {"object": "list", "created": int(time.time()), "data": data}


def _ranked(
    documents: Sequence[str] | None, top_n: int, lists: Lists, scores: Sequence[float]
) -> dict[str, Any]:
    order = sorted(range(len(scores)), key=lambda index: -scores[index])
    results = []
    for index in order[: top_n if top_n > 0 else None]:
        document = {} if documents is None else {"document": {"text": lists.text(documents[index])}}
        results.append({"index": index, **document, "relevance_score": scores[index]})
    return {"results": results}


class Comparing(CreatingEndpoint):
    def __init__(self, serving: Serving, name: str, kind: type[ComparedTexts]):
        """`name`: with which the ids of its answers begin."""
        super().__init__(serving)
        self._name, self._kind = name, kind

    async def _read(
        self, request: Exchange, body: Mapping[str, Any], arrival: Arrival, admit: Admit
    ) -> ParsedRequest:
        model = self._gateway.model(body.get("model"))
        options = read_request(self._kind, body, model.validator.limits)
        first, second = options.sides
        inputs, most = [*first, *second], self._gateway.config.max_prompts
        if len(inputs) > most:
            field = second[0][0].partition("[")[0]
            raise refuse(field, f"{len(inputs)} texts in all; at most {most} at once (max_prompts)", most)
        caller, repeated = caller_of(request), options.repeated_bytes
        envelope = Envelope(request_id(request), options.model, options.cache_salt or "", prompts=len(inputs))
        completions, vectors = await read_inputs(
            self._gateway,
            model,
            inputs,
            options,
            envelope,
            caller,
            admit=lambda further: admit(further, repeated),
            next_turn=lambda: self._serving.start_turn(request, model.name),
        )
        head = {"id": f"{self._name}-{secrets.token_hex(12)}", "model": completions[0].model}
        form = ScoresForm(head, len(first), options.shown, admin=caller.admin)
        return ParsedRequest(completions, False, form, arrival, repeated, dimensions=vectors.dimensions)


class ScoresForm:
    """The form of an answer with scores. `first`: of the inputs are compared with the others."""

    def __init__(self, head: Mapping[str, str], first: int, shown: Shown, *, admin: bool):
        self._head, self._first, self._shown, self._admin = head, first, shown, admin

    def whole(self, choices: int) -> ScoresAnswer:
        return ScoresAnswer(self, choices)

    def streamed(self, choices: int) -> StreamedAnswer:
        raise TypeError("scores are not streamed")

    def encode(self, sent: Sequence[bytes], outcomes: Sequence[Outcome]) -> list[bytes]:
        """The answer's JSON, in pieces. `sent`: the inputs' vectors, of float32."""
        vectors = [np.frombuffer(one, dtype="<f4").astype(np.float64) for one in sent]
        first, second = vectors[: self._first], vectors[self._first :]
        if len(first) == 1:
            first *= len(second)
        lists = Lists()
        shown = self._shown(lists, [_similarity(*pair) for pair in zip(first, second, strict=True)])
        usage, own = usage_shown(outcomes), baton(outcomes[-1], admin=self._admin)
        return lists.encode({**self._head, **shown, "usage": usage, "baton": own})


class ScoresAnswer:
    """Collects the vectors of all inputs."""

    def __init__(self, form: ScoresForm, inputs: int):
        self._form = form
        self._sent = [b""] * inputs

    def add(self, deltas: Sequence[Delta]) -> None:
        for delta in deltas:
            for token in delta.prompt:
                self._sent[delta.choice] = token.embedding

    def body(self, outcomes: Sequence[Outcome]) -> Sequence[bytes]:
        return self._form.encode(self._sent, outcomes)


def _similarity(one: npt.NDArray[np.float64], other: npt.NDArray[np.float64]) -> float:
    """The cosine of the angle between them."""
    lengths = float(np.linalg.norm(one) * np.linalg.norm(other))
    return min(1.0, max(-1.0, float(one @ other) / max(lengths, _MIN_PRODUCT)))
