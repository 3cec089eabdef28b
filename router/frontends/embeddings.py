"""Embeddings as both frontends make them: requests of the inputs, and vectors of what workers send."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from cluster.protocol.pooling import Embedding
from cluster.security.keys import Caller
from router.gateway import RequestGateway
from router.request.completion import Completion, Outcome
from router.request.embedding_options import InputOptions
from router.request.fields import numbered
from router.request.permissions import check_allowed
from router.request.served_model import ServedModel
from router.request.validator import Envelope
from wire import inference_pb2

_MIN_LENGTH = 1e-12  # by which torch's normalisation divides at least


@dataclass(frozen=True)
class Vectors:
    """How the vectors of one request are made of those that workers send."""

    how: Embedding
    dimensions: int

    @property
    def packed_bytes(self) -> int:
        """Bytes of one vector."""
        return 4 * self.dimensions

    def of(self, sent: bytes) -> npt.NDArray[np.float32]:
        """float32 [dimensions] of a worker's bytes: cut, and then normalised if the checkpoint says so."""
        made: npt.NDArray[Any] = np.frombuffer(sent, dtype="<f4")[: self.dimensions]
        if self.how.normalised:
            made = made / max(float(np.linalg.norm(made.astype(np.float64))), _MIN_LENGTH)
        return np.ascontiguousarray(made, dtype="<f4")


NamedInput = tuple[str, str | Sequence[int]]  # the name of its field in errors, and a text or token ids


def named(field: str, inputs: Sequence[str | Sequence[int]]) -> list[NamedInput]:
    """The inputs of one field."""
    return [(numbered(field, index, len(inputs)), one) for index, one in enumerate(inputs)]


async def read_inputs(
    gateway: RequestGateway,
    model: ServedModel,
    inputs: Sequence[NamedInput],
    options: InputOptions,
    envelope: Envelope,
    caller: Caller,
    *,
    admit: Callable[[int], None],
    next_turn: Callable[[], Awaitable[None]],
) -> tuple[list[Completion], Vectors]:
    """One completion for each input. `admit` takes places for further ones, `next_turn` is awaited before each of them is
    tokenised. Raises BatonError."""
    how = model.embedding
    vectors = Vectors(how, options.dimensions_of(how))
    last_field = inputs[-1][0].partition("[")[0]
    model.validator.check_embeddings(len(inputs), how, last_field)
    # Before tokenising: a request that gets no place costs nothing of the quota.
    admit(len(inputs) - 1)
    completions: list[Completion] = []
    async with gateway.preparing(caller, model.name):
        for field, one in inputs:
            if completions:
                await next_turn()
            tokens = await _tokens(gateway, model, one, options, caller.tenant, envelope.cache_salt, field)
            completions.append(model.validator.embedding(tokens, how, envelope, options.priority or 0, field))
        check_allowed(completions[0], caller, model.name)
    return completions, vectors


async def _tokens(
    gateway: RequestGateway,
    model: ServedModel,
    given: str | Sequence[int],
    options: InputOptions,
    tenant: str,
    cache_salt: str,
    field: str,
) -> Sequence[int]:
    tokens: Sequence[int]
    if not isinstance(given, str):
        tokens = given
    else:
        tokens = await gateway.encode(
            given,
            model=model.name,
            special=options.add_special_tokens is not False,
            truncated=options.truncate_prompt_tokens is not None,
            tenant=tenant,
            cache_salt=cache_salt,
            field=field,
        )
    return options.kept(tokens, model.validator.longest_input(model.embedding)[0])


def usage_of(outcomes: Sequence[Outcome]) -> inference_pb2.Usage:
    """The usage of all inputs."""
    return inference_pb2.Usage(
        prompt_tokens=sum(outcome.usage.prompt_tokens for outcome in outcomes),
        cached_tokens=sum(outcome.usage.cached_tokens for outcome in outcomes),
    )
