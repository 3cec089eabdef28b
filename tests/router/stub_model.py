"""A served model for gateways of tests."""

from __future__ import annotations

from typing import Any

from cluster.config.router import RouterConfig
from router.request.adapters import Adapters, no_adapters
from router.request.answer_plan import AnswerPlans, Formats, NoFormats
from router.request.grammar.requested import GrammarChecks
from router.request.served_model import ServedModel
from router.request.validator import Validator

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
