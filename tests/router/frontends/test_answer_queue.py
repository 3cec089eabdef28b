"""The deltas of an answer on their way to the connection: together, paced, and only while the client reads."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import weakref
from collections.abc import Iterable
from typing import Any

import pytest

from cluster.errors import CancelledError, InternalError
from router.dispatch.dispatcher import PIECE_SECONDS
from router.dispatch.turn import Turn
from router.frontends.answer_queue import EMBEDDING_BYTES, ENTRIES_AT_ONCE, AnswerQueue
from router.request.completion import Delta
from tests.harness.waiting import until
from wire import common_pb2


class StubExchange:
    def __init__(self) -> None:
        self.paused = False
        self.watcher: Any = None

    def watch(self, watcher: Any) -> None:
        self.watcher = watcher

    def unwatch(self) -> None:
        self.watcher = None


class StubDispatcher:
    queue: AnswerQueue
    stopped = False

    def start(self, queue: AnswerQueue) -> None:
        self.queue = queue

    def stop(self) -> None:
        self.stopped = True


class Answer:
    """An answer of one dispatcher, and what was written of it."""

    def __init__(self, *, streamed: bool = True) -> None:
        self.exchange, self.dispatcher = StubExchange(), StubDispatcher()
        self.written: list[list[str]] = []
        exchange: Any = self.exchange
        self.queue = AnswerQueue(exchange, self._write, 1, Turn(), streamed=streamed)
        self._passing = asyncio.ensure_future(self.queue.pass_all([self.dispatcher]))  # type: ignore[list-item]

    def _write(self, deltas: list[Delta]) -> None:
        self.written.append([delta.text for delta in deltas])

    def add(self, texts: Iterable[str]) -> None:
        for text in texts:
            self.queue.add(Delta(0, text, ()))

    async def over(self) -> None:
        await asyncio.wait_for(self._passing, 5)


@pytest.fixture
async def answer() -> Answer:
    made = Answer()
    await asyncio.sleep(0)
    return made


async def test_what_arrives_in_one_turn_is_written_at_once(answer: Answer) -> None:
    answer.add("abc")
    assert not answer.written
    await asyncio.sleep(0)
    assert answer.written == [["a", "b", "c"]]


async def test_a_burst_is_paced_and_its_end_is_not(answer: Answer, monkeypatch: pytest.MonkeyPatch) -> None:
    answer.queue._pace = 30.0
    answer.add("a")
    await asyncio.sleep(0)
    answer.add("b")
    await asyncio.sleep(3 * PIECE_SECONDS)
    answer.add("c")
    assert answer.written == [["a"]]
    answer.queue.end()
    await answer.over()
    assert answer.written == [["a"], ["b", "c"]] and answer.dispatcher.stopped


async def test_the_pace_is_that_of_whole_batches(answer: Answer) -> None:
    answer.queue._pace = 30.0
    answer.add(map(str, range(ENTRIES_AT_ONCE + 1)))
    await asyncio.sleep(0)
    assert len(answer.written) == 1
    await asyncio.sleep(0)
    assert answer.written[1:] == [[str(ENTRIES_AT_ONCE)]], "the rest in the next turn"


async def test_after_the_pace_the_next_piece_follows(answer: Answer) -> None:
    for text in "ab":
        answer.add(text)
        await asyncio.sleep(0)
    await until(lambda: len(answer.written) == 2, "the second one is written", 5)


async def test_nothing_is_written_or_granted_while_the_client_does_not_read(answer: Answer) -> None:
    """The dispatcher grants its worker credit when the queue is drained."""
    drained: list[int] = []
    answer.queue.when_drained(lambda: drained.append(len(answer.written)))
    answer.exchange.paused = True
    answer.add("a")
    await asyncio.sleep(3 * PIECE_SECONDS)
    assert not answer.written and not drained
    answer.exchange.paused = False
    answer.exchange.watcher.resumed()
    await until(lambda: answer.written == [["a"]] and drained == [1], "written, then granted", 5)


async def test_what_fills_the_clients_buffer_is_granted_once_it_has_left(answer: Answer) -> None:
    drained: list[int] = []
    answer.queue.when_drained(lambda: drained.append(len(answer.written)))
    write = answer.queue._write

    def fill(deltas: list[Delta]) -> None:
        write(deltas)
        answer.exchange.paused = True

    answer.queue._write = fill
    answer.add("a")
    await asyncio.sleep(3 * PIECE_SECONDS)
    assert answer.written == [["a"]] and not drained
    answer.exchange.paused = False
    answer.exchange.watcher.resumed()
    await until(lambda: drained == [1], "it has left", 5)


async def test_the_end_of_a_stream_waits_for_its_client(answer: Answer) -> None:
    answer.exchange.paused = True
    answer.add("a")
    answer.queue.end()
    await asyncio.sleep(3 * PIECE_SECONDS)
    assert not answer.written and not answer.dispatcher.stopped
    answer.exchange.paused = False
    answer.exchange.watcher.resumed()
    await answer.over()
    assert answer.written == [["a"]]


async def test_an_answer_that_is_not_streamed_takes_everything_at_once() -> None:
    """Its client reads nothing before its end, or still reads the answer before it."""
    answer = Answer(streamed=False)
    await asyncio.sleep(0)
    answer.exchange.paused = True
    answer.add("a")
    await asyncio.sleep(0)
    answer.queue.end()
    await answer.over()
    assert answer.written == [["a"]]


@pytest.mark.parametrize("paused", [False, True])
async def test_a_client_that_disconnects_ends_it(paused: bool, answer: Answer) -> None:
    answer.exchange.paused = paused
    answer.add("a")
    answer.exchange.watcher.disconnected()
    with pytest.raises(CancelledError):
        await answer.over()
    assert not answer.written and answer.dispatcher.stopped and answer.exchange.watcher is None


async def test_a_failure_comes_after_the_deltas_before_it(answer: Answer) -> None:
    answer.add("a")
    answer.queue.fail(InternalError("lost"))
    with pytest.raises(InternalError):
        await answer.over()
    assert answer.written == [["a"]] and answer.dispatcher.stopped


async def test_a_writer_that_fails_ends_it(answer: Answer) -> None:
    def write(deltas: list[Delta]) -> None:
        raise ValueError("not a header")

    answer.queue._write = write
    answer.add("a")
    with pytest.raises(ValueError, match="header"):
        await answer.over()
    assert answer.dispatcher.stopped


@pytest.mark.parametrize("ends", [False, True])
async def test_log_probabilities_are_written_over_several_turns(ends):
    """Also what is left at the end, and no grant before all is written."""
    answer = Answer()
    top = [common_pb2.TokenLogprob(token_id=i) for i in range(20)]
    token = common_pb2.Token(position=1, top_logprobs=top)
    drained: list[int] = []
    for number in range(100):
        answer.queue.add(Delta(0, str(number), (), prompt=(token,)))
    answer.queue.when_drained(lambda: drained.append(sum(map(len, answer.written))))
    if ends:
        answer.queue.end()
        await answer.over()
    else:
        await until(lambda: bool(drained), "the queue is drained")
        assert drained == [100]
    assert [text for one in answer.written for text in one] == [str(number) for number in range(100)]
    assert max(map(len, answer.written)) <= ENTRIES_AT_ONCE // 21 + 1
    if not ends:
        answer.queue.end()
        await answer.over()


async def test_vectors_of_many_inputs_are_written_over_several_turns() -> None:
    """Each is encoded as it is written: 1 ms for 128 KiB of them."""
    most = ENTRIES_AT_ONCE * EMBEDDING_BYTES
    answer = Answer(streamed=False)
    await asyncio.sleep(0)
    token = common_pb2.Token(embedding=bytes(most // 4))
    for text in "abcdefghij":
        answer.queue.add(Delta(0, text, (), prompt=(token,)))
    answer.queue.end()
    await answer.over()
    assert [len(one) for one in answer.written] == [4, 4, 2]


async def test_nothing_is_left_of_an_answer_whose_client_has_left() -> None:
    """The error's traceback refers to what the request had: a cycle, as the queue kept the error."""

    class Had:
        pass

    queue, left = AnswerQueue(StubExchange(), lambda _: None, 1, Turn(), streamed=True), []

    async def serve() -> None:
        had = Had()
        left.append(weakref.ref(had))
        with contextlib.suppress(CancelledError):
            await queue.pass_all([])

    gc.disable()
    try:
        serving = asyncio.create_task(serve())
        await asyncio.sleep(0)
        queue.disconnected()
        await serving
        queue.fail(InternalError("of a dispatcher, behind the end"))
        del serving
        assert left[0]() is None and queue._error is None
    finally:
        gc.enable()
