"""A gateway whose stub model calls a tool, and a stub parser that reads what it wrote."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

from cluster.grammar.spec import GrammarSpec
from router.dispatch.choice import ChoiceStream
from router.request.answer_parts import CallArguments, CallBegin, ContentText, ReasoningText
from router.request.completion import Outcome
from tests.router.frontends.golden.stub_gateway import StubGateway
from wire import common_pb2, inference_pb2

WRITTEN = ["~hmm", " so", "Let me see.", "@f", '#{"x":', "#1}"]


class Parser:
    """One letter at the begin of a token's text says what it is."""

    called = unfinished = False

    def feed(self, pieces):
        return [self._part(one) for one in pieces]

    def _part(self, text):
        if text[0] == "@":
            self.called = True
            return CallBegin(0, "call_1", text[1:])
        if text[0] == "#":
            return CallArguments(0, text[1:])
        return ReasoningText(text[1:]) if text[0] == "~" else ContentText(text)

    def end(self, *, cut=False):
        return []


class Formats:
    tool_parser, reasoning_parser = "stub", "stub"
    has_tool_grammar = True

    def format(self, conversation, rendered, constrained=False):
        return SimpleNamespace(marker_texts={}, parser=Parser)

    def tool_grammar(self, conversation, rendered, answer):
        names = "|".join(json.dumps(one.name) for one in conversation.callable)
        either = "" if answer is None or conversation.must_call else ' | "{}"'
        return GrammarSpec("lark", f"start: {names}{either}")

    def reasoning_grammar(self, conversation, rendered, spec):
        return spec


class Dispatcher:
    """Its model writes WRITTEN, a token each, and stops."""

    def __init__(self, completion, first):
        texts = iter(WRITTEN)
        detokenizer = SimpleNamespace(add=lambda token: next(texts), flush=str)
        text: Any = SimpleNamespace(detokenizer=lambda prompt: detokenizer)
        self.choices = 1
        self._stream = ChoiceStream(first, completion, text)

    @property
    def outcome(self):
        usage = inference_pb2.Usage(reasoning_tokens=self._stream.reasoning_tokens, completion_tokens=7)
        return Outcome(usage, inference_pb2.Timings())

    def start(self, deltas):
        for place in range(len(WRITTEN) + 1):
            finish: Any = common_pb2.FINISH_REASON_STOP if place == len(WRITTEN) else 0
            token = common_pb2.Token(position=self._stream.next_position, token_id=5, finish=finish)
            if (delta := self._stream.take(token)) is not None:  # nothing comes after a stop string
                deltas.add(delta)
        deltas.end()

    def stop(self):
        pass


class Gateway(StubGateway):
    def dispatcher(self, completion, first_shown):
        return Dispatcher(completion, first_shown)
