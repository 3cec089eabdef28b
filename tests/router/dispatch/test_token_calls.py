"""What a token of a streamed answer costs from its frame's row to the connection, in calls: the same on every machine."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from router.dispatch.attempt import Attempt
from router.dispatch.attempt_events import Source
from router.dispatch.choice import ChoiceStream
from router.dispatch.turn import Turn
from router.frontends.answer_queue import AnswerQueue
from router.frontends.http.connection.exchange import Exchange
from router.frontends.http.openai.events import Events
from router.frontends.http.openai.requests import StreamOptions
from router.frontends.http.openai.shapes import CompletionShape
from router.link.token import PlainToken, Token
from router.request.completion import Completion, Delta, text_delta
from tests.harness.calls import count_calls
from wire import common_pb2

PROMPT, STREAMS = 3, 64
CALLS_OF_ROW = 17  # through its attempt and choice to the queue of the answer, and that into the turn
CALLS_OF_TURN = 19  # for the queue, the event and the chunk of the body
TEXT: Any = SimpleNamespace(detokenizer=lambda prompt: SimpleNamespace(add=str))


class Stream:
    """A streamed completion, without the request between its attempt and its queue."""

    def __init__(self, turn: Turn):
        completion = Completion("r", "m", [1] * PROMPT, common_pb2.SamplingParams(max_tokens=100))
        choice = ChoiceStream(0, completion, TEXT)
        self.written: list[bytes] = []
        cycle: Any = SimpleNamespace(
            scope={"type": "http", "http_version": "1.1", "headers": []},
            receive=None,
            flow=SimpleNamespace(write_paused=False),
            transport=SimpleNamespace(write=self.written.append),
            disconnected=False,
        )
        self._exchange = Exchange(cycle, lambda: None)
        self._events = Events(CompletionShape(completion, TEXT, 1, "c", False), 1, StreamOptions(), PROMPT)
        queue = AnswerQueue(self._exchange, self._write, 1, turn, streamed=True)
        queue._pace = 0.0
        nothing: Any = None

        def take(token: Token, attempt: Attempt) -> bool:
            delta = choice.take(token)
            assert delta is not None
            queue.add(delta)
            return True

        self.attempt = Attempt(
            request_id="r",
            spec=common_pb2.GenerateSpec(),
            placed=nothing,
            channels=nothing,
            links=nothing,
            choices=[choice],
            admission_seconds=1.0,
            take=take,
            when_drained=queue.when_drained,
        )

    def _write(self, deltas: Sequence[Delta]) -> None:
        self._exchange.write(self._events.of(deltas))


async def test_a_token_of_a_plain_stream_takes_few_calls() -> None:
    turn = Turn(clock=lambda: 0.0)
    streams = [Stream(turn) for _ in range(STREAMS)]
    first, second = (PlainToken(0, position, 7) for position in (PROMPT, PROMPT + 1))

    def come(token: Token) -> None:
        for one in streams:
            one.attempt.received(Source.DECODE, token)

    come(first)
    await asyncio.sleep(0)
    assert count_calls(lambda: come(second)) <= CALLS_OF_ROW * STREAMS
    assert count_calls(turn._make) <= CALLS_OF_TURN * STREAMS
    assert all(len(one.written) == 2 and b'"text":"7"' in one.written[1] for one in streams)


def test_a_plain_delta_is_what_its_constructor_makes() -> None:
    """Its fields are written out where they are made: a new one belongs there, too."""
    token = PlainToken(0, PROMPT, 65)
    assert text_delta(1, "A", token) == Delta(1, "A", (token,))
