"""A gateway that checks requests as the router does and answers accepted ones with one token per choice."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from google.protobuf.json_format import MessageToDict

from cluster.config.router import RouterConfig
from cluster.protocol.block_hash import unpack_tokens
from cluster.security.keys import ANYONE, Caller
from router.admission.admission import Admission
from router.admission.low_priority import LowPriority
from router.dispatch.batch_queue import BatchQueue
from router.gateway import RequestGateway
from router.http_endpoint import HttpEndpoint
from router.observe.traces import Arrival
from router.request.answer_plan import Formats
from router.request.completion import Completion, Delta, Outcome
from router.request.served_model import further_models
from router.text.tokenizer import ModelText
from tests.router.stub_model import NO_FORMATS, stub_model
from wire import common_pb2, inference_pb2

# The prompts of bodies and messages that set options only
BASE_PROMPTS = [[5, 6, 7, 8], [1, 3, 431, 203, 1439, 367, 4, 203, 3, 463, 203]]
# What most requests ask for
USUAL = {
    "temperature": 0.5,
    "top_k": 20,
    "top_p": 1.0,
    "repetition_penalty": 1.0,
    "seed": 42,
    "n": 1,
    "deadline_seconds": 600.0,
}
_FIELDS = (
    "n",
    "stop",
    "include_stop_text",
    "priority",
    "cache_salt",
    "resume_tokens",
    "deadline_seconds",
    "explain",
    "reconnects",
)
DEMO = Path(__file__).resolve().parents[4] / "demo" / "model"


class StubDispatcher:
    def __init__(self, completion: Completion, first_shown: int):
        self.choices = completion.n
        self._first = first_shown
        self.outcome = Outcome(inference_pb2.Usage(), inference_pb2.Timings())

    def start(self, deltas: BatchQueue[Delta]) -> None:
        for choice in range(self.choices):
            token = common_pb2.Token(token_id=5, choice=choice)
            deltas.add(Delta(self._first + choice, "x", (token,), "length"))
        deltas.end()

    def stop(self) -> None:
        pass


class StubGateway(RequestGateway):
    """`accepted` lists the completions that would have been dispatched."""

    def __init__(self, text: ModelText, settings: dict[str, Any], formats: Formats = NO_FORMATS):
        self.config = RouterConfig(
            model=DEMO, served_model_name="tiny", secret="x" * 16, http_port=0, **settings
        )
        self.first = stub_model(self.config, text, formats=formats)
        self.low_priority = LowPriority()
        self.keys = SimpleNamespace(on=False)  # type: ignore[assignment]
        self.created_unix_seconds = 0
        self.draining = False
        self.admission = Admission(self.config, lambda tenant: None)
        self.accepted: list[Completion] = []

    @contextlib.contextmanager
    def request(  # type: ignore[override]
        self,
        completion: Completion,
        caller: Caller = ANYONE,
        first_shown: int = 0,
        arrival: Arrival | None = None,
        identity: object = None,
    ) -> Iterator[StubDispatcher]:
        self.accepted.append(completion)
        yield self.dispatcher(completion, first_shown)

    def dispatcher(self, completion: Completion, first_shown: int) -> StubDispatcher:
        return StubDispatcher(completion, first_shown)


@contextlib.asynccontextmanager
async def served(gateway: StubGateway) -> AsyncIterator[str]:
    """The URL of the router's HTTP endpoint in front of it."""
    endpoint = HttpEndpoint(gateway.config, gateway, None, ask_clients=False)
    serving = asyncio.create_task(endpoint.serve())
    try:
        yield endpoint.url
    finally:
        endpoint.stop()
        await serving


@contextlib.contextmanager
def stub_of_two_models() -> Iterator[StubGateway]:
    """Of `tiny`, also named `one`, and of `second`, also named `two`, with a context of 33 tokens."""
    text = ModelText(DEMO)
    second = {"name": "second", "model": DEMO, "aliases": ["two"], "max_model_len": 33}
    made = StubGateway(text, {"models": [second], "model_aliases": ["one"]})
    made.further = further_models(made.config, {"second": text})
    yield made
    text.close()


def told(completion: Completion) -> dict[str, Any]:
    """What a request asks for, as far as it differs from one that sets no options; null where it lacks what that has."""
    sampling = completion.sampling
    made = {
        **{field.name: value for field, value in sampling.ListFields()},
        "stop_token_ids": list(sampling.stop_token_ids),
        "logit_bias": {str(key): value for key, value in sorted(sampling.logit_bias.items())},
        "allowed_tokens": sampling.allowed_tokens.hex()[-40:],
        "bad_words": list(map(unpack_tokens, sampling.bad_words)),
        **{name: getattr(completion, name) for name in _FIELDS},
        "grammar": _grammar(completion),
        "prompt_tokens": _short(completion.prompt_tokens),
        "request_id": completion.request_id if not completion.request_id.startswith("req-") else "",
    }
    found = {name: value for name, value in made.items() if value and USUAL.get(name) != value}
    return found | dict.fromkeys(name for name in USUAL if not made.get(name))


def _grammar(completion: Completion) -> dict[str, Any]:
    return {} if completion.grammar is None else MessageToDict(completion.grammar)


def _short(prompt: list[int]) -> list[int]:
    if prompt in BASE_PROMPTS:
        return []
    return prompt if len(prompt) <= 12 else [len(prompt), *prompt[:4]]
