"""A gateway with the router's own checks over a tokenizer that counts its calls."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any

from cluster.config.router import RouterConfig
from router.admission.start_queue import StartQueue
from router.gateway import RequestGateway
from router.request.answer_plan import AnswerPlan
from router.text.contents import Rendered
from router.text.conversation import Conversation
from tests.router.stub_model import NoGrammars, stub_model

CONTEXT = 64


class Gateway(SimpleNamespace):
    encode, converse = RequestGateway.encode, RequestGateway.converse
    preparing, _preparing = RequestGateway.preparing, RequestGateway._preparing
    model, models, further = RequestGateway.model, RequestGateway.models, RequestGateway.further
    check_message, check_ticket = RequestGateway.check_message, RequestGateway.check_ticket
    in_time, _prefix_scope = RequestGateway.in_time, RequestGateway._prefix_scope
    _rate_limits, _owned = RequestGateway._rate_limits, RequestGateway._owned
    counted, _buckets = RequestGateway.counted, RequestGateway._buckets
    decode, lengths = RequestGateway.decode, RequestGateway.lengths


class Text:
    """A byte-level tokenizer that counts its calls."""

    vocab_size, max_position_embeddings = 300, CONTEXT
    generation: Mapping[str, Any] = MappingProxyType({})
    most_bytes: int | None = 3
    has_head: bool = True

    def __init__(self) -> None:
        self.encoded: list[str] = []
        self.scopes: list[str] = []
        self.rendered = 0

    async def encode(
        self, text: str, *, special: bool = True, tenant: str = "", scope: str = ""
    ) -> list[int]:
        self.encoded.append(text)
        self.scopes.append(scope)
        return [1]

    async def chat(self, read: Any, characters: int, *, tenant: str = "") -> tuple[Conversation, Rendered]:
        self.rendered += 1
        given = read()
        return given, Rendered("".join(message["content"] for message in given.messages))


def counting_gateway(config: RouterConfig | None = None) -> Any:
    text: Any = Text()
    config = config or RouterConfig(model=Path("/models/m"))
    admission = SimpleNamespace(starts=StartQueue())
    plans = SimpleNamespace(plan=lambda *given: AnswerPlan(), reasoning_parser="")
    first = stub_model(config, text, grammars=NoGrammars(), plans=plans)
    return Gateway(first=first, text=text, config=config, admission=admission)
