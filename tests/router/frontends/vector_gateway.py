"""A gateway whose workers would make a vector of each input, by its tokens."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import pytest

from cluster.protocol.pooling import Embedding, Pooling
from router.request.completion import Completion, Delta, Outcome
from router.text.tokenizer import ModelText
from tests.router.frontends.golden.stub_gateway import DEMO, StubDispatcher, StubGateway
from wire import common_pb2, inference_pb2

DIMENSIONS = 8
HOW = Embedding(Pooling.MEAN, DIMENSIONS, normalised=True, max_tokens=20, shorter=(4, DIMENSIONS))


def vector_of(tokens: list[int]) -> np.ndarray:
    """As a worker sends it."""
    return np.random.default_rng(tokens).standard_normal(DIMENSIONS).astype("<f4") * 3


def unit(vector: np.ndarray) -> np.ndarray:
    return vector / np.linalg.norm(vector.astype(np.float64))


class VectorDispatcher(StubDispatcher):
    tokens: list[int]
    stopped = False
    silent = False

    def start(self, deltas: Any) -> None:
        if self.silent:
            return
        token = common_pb2.Token(position=1, embedding=vector_of(self.tokens).tobytes())
        deltas.add(Delta(self._first, "", (), prompt=(token,)))
        deltas.add(Delta(self._first, "x", (common_pb2.Token(token_id=5),), "length"))
        deltas.end()

    def stop(self) -> None:
        self.stopped = True


class VectorGateway(StubGateway):
    """`silent`: its workers answer nothing."""

    url = ""
    silent = False
    made: list[VectorDispatcher]

    @contextlib.contextmanager
    def request(  # type: ignore[override]
        self, completion: Completion, caller: Any = None, first_shown: int = 0, arrival: Any = None
    ) -> Iterator[VectorDispatcher]:
        self.accepted.append(completion)
        made = VectorDispatcher(completion, first_shown)
        made.tokens, made.silent = completion.prompt_tokens, self.silent
        usage = inference_pb2.Usage(prompt_tokens=len(made.tokens), cached_tokens=1)
        made.outcome = Outcome(usage, inference_pb2.Timings(prefill_seconds=0.5, prefill_worker="p"))
        self.made.append(made)
        yield made


def vector_gateway(settings: dict[str, Any]) -> VectorGateway:
    text = ModelText(DEMO)
    text.embedding = HOW
    made = VectorGateway(text, settings)
    made.made = []
    return made


def client_of(gateway: VectorGateway, monkeypatch: pytest.MonkeyPatch) -> Iterator[httpx.Client]:
    """A client of the gateway that is served, as it was made: with HOW, and no input accepted yet."""
    gateway.accepted.clear()
    monkeypatch.setattr(gateway.first.text, "embedding", HOW)
    with httpx.Client(base_url=gateway.url, timeout=60) as made:
        yield made


def close(gateway: VectorGateway) -> None:
    gateway.first.grammars.close()
    gateway.first.text.close()
