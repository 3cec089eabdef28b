"""Embeddings: requests of Python values, and results of answers."""

from __future__ import annotations

from collections.abc import Sequence

from baton.client.progress import read_result
from baton.client.request import naming, token_ids
from baton.client.types import Embeddings, EmbedInputs, EmbedOptions, Timings, Usage
from cluster.errors import InvalidRequestError
from wire import inference_pb2 as pb


def embed_request(inputs: EmbedInputs, options: EmbedOptions) -> pb.EmbedRequest:
    """Build a request; an option that is None is left out. Raises InvalidRequestError for values that protobuf cannot
    hold; the router checks the rest."""
    request = pb.EmbedRequest()
    with naming("input"):
        for one in _several(inputs):
            if isinstance(one, str):
                request.input.add(text=one)
            else:
                request.input.add(token_ids=token_ids(one))
    for name, value in options.items():
        if name not in EmbedOptions.__annotations__:
            raise InvalidRequestError(f"unknown option {name!r}", field=name)
        if value is None or name == "timeout_seconds":
            continue
        with naming(name):
            setattr(request, name, value)
    return request


def _several(inputs: EmbedInputs) -> Sequence[str | Sequence[int]]:
    if isinstance(inputs, str):
        return [inputs]
    first = inputs[0] if len(inputs) else ""
    # Rows of an array of numpy or torch are lists too; its elements are numbers.
    if isinstance(first, str | Sequence) or getattr(first, "ndim", 0) > 0:
        return inputs  # type: ignore[return-value]
    return [inputs]  # type: ignore[list-item]


def embeddings_of(answer: pb.EmbedResponse) -> Embeddings:
    return Embeddings(
        answer.request_id,
        answer.model,
        tuple(tuple(one.values) for one in answer.embeddings),
        read_result(Usage, answer.usage),
        read_result(Timings, answer.timings),
    )
