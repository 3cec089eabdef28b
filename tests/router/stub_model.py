"""A served model for gateways of tests."""

from __future__ import annotations

from typing import Any

from cluster.config.router import RouterConfig
from cluster.grammar.spec import GrammarSpec
from router.request.adapters import Adapters, no_adapters
from router.request.answer_plan import AnswerPlans, Formats
from router.request.completion import ParserSource
from router.request.grammar.requested import GrammarChecks
from router.request.served_model import ServedModel
from router.request.validator import Validator
from router.text.conversation import Conversation


class NoFormats:
    """Answers are not parsed."""

    tool_parser = reasoning_parser = ""
    has_tool_grammar = False

    def format(
        self, conversation: Conversation, rendered: str, *, constrained: bool = False
    ) -> ParserSource | None:
        return None

    def tool_grammar(
        self, conversation: Conversation, rendered: str, answer: GrammarSpec | None
    ) -> GrammarSpec:
        raise ValueError("the model's calls have no parser")

    def reasoning_grammar(self, conversation: Conversation, rendered: str, spec: GrammarSpec) -> GrammarSpec:
        return spec


NO_FORMATS = NoFormats()


def stub_model(
    config: RouterConfig,
    text: Any,
    *,
    formats: Formats = NO_FORMATS,
    adapters: Adapters = no_adapters,
    **parts: Any,
) -> ServedModel:
    """As of a router's, with these formats of calls and reasoning; `parts` take the place of its own."""
    grammars = parts.get("grammars") or GrammarChecks(text.tokenizer_json(), text.vocab_size, (2,))
    plans = parts.get("plans") or AnswerPlans(formats, grammars.refusal)
    return ServedModel(text, Validator(config, text, adapters), grammars, plans)


class NoGrammars:
    """The checks of a model whose requests have no grammar."""

    refusal = ""

    async def check(self, tenant: str, *asked: object) -> None:
        assert not asked
