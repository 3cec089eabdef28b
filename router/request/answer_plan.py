"""How a conversation is answered: the prompt, the parser of its answers, and the grammar that they match."""

from __future__ import annotations

from dataclasses import dataclass, field

from cluster.config.router import RouterConfig
from cluster.errors import UnsupportedFieldError
from router.request.completion import ParserSource
from router.request.grammars import AskedGrammar
from router.text.conversation import Conversation
from router.text.tokenizer import ModelText


@dataclass(frozen=True)
class AnswerPlan:
    """`format`: None = answers are not parsed. `checks`: grammars of which `grammar` consists, which name the part of the
    request that cannot be compiled."""

    format: ParserSource | None = None
    grammar: AskedGrammar | None = None
    checks: tuple[AskedGrammar, ...] = ()


@dataclass(frozen=True)
class ChatPrompt:
    """A conversation as a request to workers: Validator.completion takes both."""

    tokens: list[int]
    plan: AnswerPlan = field(default_factory=AnswerPlan)


class AnswerPlans:
    """Plans answers for one model. `grammar_refusal`: why its requests cannot have a grammar; empty if they can."""

    def __init__(self, settings: RouterConfig, text: ModelText, grammar_refusal: str):
        self.tool_parser = ""  # its name; empty = requests may not have tools
        self.reasoning_parser = ""
        self._refusal = grammar_refusal

    def plan(self, conversation: Conversation, rendered: str, asked: AskedGrammar | None) -> AnswerPlan:
        """`rendered`: the prompt's text, which may begin the reasoning. Raises InvalidRequestError."""
        if conversation.callable and not self.tool_parser:
            raise UnsupportedFieldError(
                "tools: no parser is known for this model's calls; the router's setting tool_parser names one",
                field="tools",
            )
        return AnswerPlan(None, asked, () if asked is None else (asked,))
