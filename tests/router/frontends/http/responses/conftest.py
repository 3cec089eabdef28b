"""A router in front of scripted answers, in this process."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from cluster.errors import BatonError
from cluster.grammar.spec import GrammarSpec
from router.request.answer_parts import Part
from router.request.completion import Completion, Delta, Outcome
from router.request.grammar.requested import ANY_OBJECT
from router.text.conversation import Conversation
from router.text.tokenizer import ModelText
from tests.router.frontends.golden.stub_gateway import DEMO, StubDispatcher, StubGateway, served
from tests.router.stub_model import NoFormats
from wire import common_pb2, inference_pb2

TOKEN = (common_pb2.Token(token_id=5, logprob=-0.5),)


class ScriptedFormats(NoFormats):
    """Calls are allowed, and a demanded one is any object."""

    tool_parser = "scripted"
    has_tool_grammar = True

    def tool_grammar(
        self, conversation: Conversation, rendered: str, answer: GrammarSpec | None
    ) -> GrammarSpec:
        return ANY_OBJECT


class ScriptedGateway(StubGateway):
    """Answers with these parts, a token each, and then ends or fails."""

    url = ""

    def script(
        self,
        parts: Sequence[Part],
        finish: Any = "stop",
        error: BatonError | None = None,
        stop_string: str | None = None,
    ) -> None:
        self.parts, self.finish, self.error, self.stop_string = parts, finish, error, stop_string
        self.accepted.clear()

    def dispatcher(self, completion: Completion, first_shown: int) -> StubDispatcher:
        return ScriptedDispatcher(completion, self)


class ScriptedDispatcher(StubDispatcher):
    def __init__(self, completion: Completion, script: ScriptedGateway):
        super().__init__(completion, 0)
        self._script = script
        usage = inference_pb2.Usage(prompt_tokens=7, completion_tokens=9, cached_tokens=4, reasoning_tokens=2)
        self.outcome = Outcome(usage, inference_pb2.Timings())

    def start(self, deltas: Any) -> None:
        script = self._script
        for part in script.parts:
            deltas.add(Delta(0, "", TOKEN, None, (part,)))
        if script.error is not None:
            deltas.fail(script.error)
            return
        deltas.add(Delta(0, "", TOKEN, script.finish, (), script.stop_string))
        deltas.end()


@contextlib.contextmanager
def serving(gateway: StubGateway) -> Iterator[str]:
    """The URL of its HTTP endpoint, which runs on a thread."""
    loop, stop = asyncio.new_event_loop(), asyncio.Event()
    started: list[str] = []
    ready = threading.Event()

    async def serve() -> None:
        async with served(gateway) as url:
            started.append(url)
            ready.set()
            await stop.wait()

    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),))
    thread.start()
    try:
        assert ready.wait(30)
        yield started[0]
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join()
        loop.close()


@pytest.fixture(scope="session")
def scripted() -> Iterator[ScriptedGateway]:
    text = ModelText(DEMO)
    gateway = ScriptedGateway(text, {}, ScriptedFormats())
    with serving(gateway) as url:
        gateway.url = f"{url}/v1"
        yield gateway
    gateway.first.grammars.close()
    text.close()
