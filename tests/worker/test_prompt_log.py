"""Log probabilities of a prompt in a worker's log: packed, sent in bounded frames, within the router's credit."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from cluster.membership.status import WorkerStatus
from cluster.protocol.link import prompt_window_of
from engine.prompt_scores import Scores
from engine.request import PromptEmbedding, PromptOutput
from wire import common_pb2
from worker.admission import Admissions
from worker.attempt_log import AttemptLog
from worker.link import outgoing
from worker.link.handle import Handle, HandleState
from worker.link.outgoing import Outgoing
from worker.metrics import of_queue, of_requests
from worker.prompt_scores_room import PromptScoresRoom
from worker.request_counts import RequestCounts

COUNT, TOP = 2000, 20
WINDOW = prompt_window_of(TOP)


def scores(count: int, alternatives: int = TOP) -> Scores:
    ids = np.arange(count * (1 + alternatives), dtype=np.uint32).reshape(count, -1)
    return Scores(np.full(count, 9, np.uint32), ids, (ids / -64).astype(np.float32))  # exact in 32 bits


def log_of(alternatives: int = TOP) -> AttemptLog:
    sampling = common_pb2.SamplingParams(max_tokens=1, prompt_logprobs=True, prompt_top_logprobs=alternatives)
    return AttemptLog.of(
        common_pb2.GenerateSpec(prompt_tokens=bytes(4 * COUNT), sampling=sampling, n=2), lambda: None
    )


class Link:
    """The link of one handle."""

    def __init__(self, log: AttemptLog):
        self.out = Outgoing()
        self.handle = Handle((1, 1), b"t" * 16, common_pb2.GenerateSpec())
        self.handle.log = log
        self.handle.to(HandleState.OPEN)
        self.largest = 0

    def sent(self) -> list[common_pb2.Token]:
        """What is due, in frames."""
        self.out.due(self.handle)
        tokens: list[common_pb2.Token] = []
        while not self.out.empty:
            frame, _ = self.out.next_frame()
            extras = [one.token for one in frame.extras]
            self.largest = max(self.largest, sum(1 + len(one.top_logprobs) for one in extras))
            tokens += extras
        return tokens


def test_a_prompt_is_sent_within_its_credit_and_in_small_frames():
    log = log_of()
    log.add_prompt_output(PromptOutput("r", 1, scores(1000)))
    log.add_prompt_output(PromptOutput("r", 1001, scores(COUNT - 1001)))
    assert not log.full and log.prompt is not None
    link, positions = Link(log), []
    while sent := link.sent():
        assert len(sent) <= WINDOW
        positions += [one.position for one in sent]
        assert log.credit(2, positions[-1] + 1 + WINDOW) or positions[-1] + 1 == COUNT
    assert positions == list(range(1, COUNT))
    assert link.largest <= outgoing.PROMPT_ENTRIES + TOP
    assert log.all_sent
    # What is acknowledged is not kept
    assert len(log.prompt.tokens) <= WINDOW and len(log.prompt.packed._packed) <= 1


def test_a_token_of_the_prompt_is_what_the_engine_reported():
    log = log_of(2)
    log.add_prompt_output(PromptOutput("r", 1, scores(3, 2)))
    second = Link(log).sent()[1]
    assert (second.choice, second.position, second.token_id, second.rank) == (2, 2, 3, 9)
    assert second.logprob == -3 / 64
    assert [(one.token_id, one.logprob) for one in second.top_logprobs] == [(4, -4 / 64), (5, -5 / 64)]


def test_a_prompt_goes_on_at_the_position_that_a_new_link_asks_for():
    log = log_of()
    log.add_prompt_output(PromptOutput("r", 1, scores(COUNT - 1)))
    link = Link(log)
    link.sent()
    assert log.resume([COUNT, COUNT, 7], [2 * COUNT, 2 * COUNT, 1 + WINDOW])
    assert next(iter(link.sent())).position == 7


def test_scores_that_leave_a_gap_are_refused():
    log = log_of()
    with pytest.raises(ValueError, match="position 2 of the prompt came, 1 was next"):
        log.add_prompt_output(PromptOutput("r", 2, scores(1)))


class Frames:
    """A link whose frames are read as a router reads them: the columns before what is more than an id."""

    def __init__(self, log: AttemptLog):
        self.link = Link(log)

    def read(self) -> list[tuple[int, int]]:
        """Choices and positions in the order in which a router takes them, and one frame's after the other's."""
        out = self.link.out
        found: list[tuple[int, int]] = []
        out.due(self.link.handle)
        for _ in range(50):
            if out.empty:
                return found
            frame, _ = out.next_frame()
            found += zip(frame.tokens.choice, frame.tokens.position, strict=True)
            found += [(one.token.choice, one.token.position) for one in frame.extras]
        raise AssertionError("frames without end")


def test_an_answers_plain_tokens_come_behind_its_prompt():
    log = log_of(2)
    log.add_prompt_output(PromptOutput("r", 1, scores(5, 2)))
    for position in (COUNT, COUNT + 1):
        for choice in (0, 1):
            log.add(choice, position, 7)
    found = Frames(log).read()
    assert found[:5] == [(2, position) for position in range(1, 6)]
    assert sorted(found[5:]) == [(choice, COUNT + i) for choice in (0, 1) for i in (0, 1)]


def test_an_answer_waits_for_a_prompt_without_credit_and_no_frame_is_sent_meanwhile():
    log = log_of()
    log.add_prompt_output(PromptOutput("r", 1, scores(COUNT - 1)))
    log.add(0, COUNT, 7)
    frames = Frames(log)
    assert log.prompt is not None
    assert frames.read()[-1] == (2, WINDOW) and not log.may_send and not frames.link.handle.waits
    found: list[tuple[int, int]] = []
    while log.credit(2, log.prompt.sent + WINDOW):
        found += frames.read()
    assert found[-1] == (0, COUNT) and log.all_sent


def test_an_embedding_is_sent_before_the_token_that_ends_its_attempt_and_pauses_nothing():
    sampling = common_pb2.SamplingParams(max_tokens=1, pooling=common_pb2.POOLING_MEAN)
    log = AttemptLog.of(common_pb2.GenerateSpec(prompt_tokens=bytes(4), sampling=sampling), lambda: None)
    made = PromptEmbedding("r", 7, b"12345678")
    log.add_prompt_output(made)
    log.add(0, 1, 5)
    assert [one.choice for one in log.in_order] == [1, 0] and log.may_send and not log.full and log.count == 2
    with pytest.raises(ValueError, match="an embedding came"):
        log.add_prompt_output(made)
    (sent,) = Link(log).sent()  # the other is a row of its frame
    assert (sent.choice, sent.position, sent.token_id, sent.embedding) == (1, 1, 7, b"12345678")


def scored_spec(tenant: str = "", count: int = COUNT, priority: int = 0) -> common_pb2.GenerateSpec:
    sampling = common_pb2.SamplingParams(max_tokens=1, prompt_logprobs=True, prompt_top_logprobs=TOP)
    return common_pb2.GenerateSpec(
        prompt_tokens=bytes(4 * count), sampling=sampling, n=2, tenant=tenant, priority=priority
    )


async def enters(
    room: PromptScoresRoom, log: AttemptLog, tenant: str = "", priority: int = 0
) -> asyncio.Task[None]:
    task = asyncio.create_task(room.enter(scored_spec(tenant, priority=priority), log, 60.0))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    return task


async def test_unread_log_probabilities_are_bounded():
    """Two prompts fill the room; the next one of the same tenant waits until one of them is read but for a window."""
    size = COUNT * (4 + 8 * (1 + TOP))
    room, logs = PromptScoresRoom(30.0, 2 * size), [log_of() for _ in range(5)]
    packed = scores(COUNT - 1)
    assert packed.ranks.nbytes + packed.token_ids.nbytes + packed.logprobs.nbytes <= size
    tasks = [await enters(room, log, "t") for log in logs[:4]]
    assert [one.done() for one in tasks] == [True, True, False, False] and room.held_bytes == 2 * size
    assert (await enters(room, logs[4], "other")).done(), "no other tenant is kept out"
    log = logs[0]
    log.add_prompt_output(PromptOutput("r", 1, packed))
    link, positions = Link(log), [0]
    while (sent := link.sent()) and positions[-1] + WINDOW < COUNT - WINDOW:
        positions += [one.position for one in sent]
        assert room.held_bytes == 3 * size
        log.credit(2, positions[-1] + 1 + WINDOW)
    log.credit(2, COUNT)
    log.release_room()  # it is given back once
    await asyncio.sleep(0)
    assert room.held_bytes == 2 * size and not tasks[2].done(), "the other tenant's is beyond the bound"
    logs[4].release_room()
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert tasks[2].done() and not tasks[3].done()
    tasks[3].cancel()
    for log in logs:
        log.release_room()
    assert room.held_bytes == 0
    await room.enter(common_pb2.GenerateSpec(), logs[0], 1.0)
    assert room.held_bytes == 0, "others hold none"


async def test_a_link_that_attaches_behind_the_prompt_gives_its_room_back():
    """The credit that said so may be lost with the link before."""
    room, log = PromptScoresRoom(30.0), log_of()
    await enters(room, log)
    log.add_prompt_output(PromptOutput("r", 1, scores(COUNT - 1)))
    held = room.held_bytes
    assert log.resume([COUNT, COUNT, 5], [COUNT + 1, COUNT + 1, 5 + WINDOW]) and room.held_bytes == held > 0
    assert log.resume([COUNT, COUNT, COUNT], [COUNT + 1, COUNT + 1, COUNT + WINDOW])
    assert room.held_bytes == 0


async def test_requests_that_hold_room_keep_none_of_a_higher_class_out():
    """They hold it while they wait for their turn, which those of a higher class have first."""
    size = COUNT * (4 + 8 * (1 + TOP))
    room, logs = PromptScoresRoom(30.0, size), [log_of() for _ in range(5)]
    asked = [(-1, True), (0, True), (1, True), (1, False), (-1, False)]
    tasks = []
    for log, (priority, enters_now) in zip(logs, asked, strict=True):
        tasks.append(await enters(room, log, "t", priority))
        assert tasks[-1].done() == enters_now
    assert room.held_bytes == 3 * size
    assert room.waiting == 2 and room.waiting_by_class() == {"high": 1, "normal": 0, "batch": 1}
    logs[2].release_room()
    await tasks[3]
    assert not tasks[4].done(), "the batch class holds room"
    for log in logs:
        log.release_room()
    await tasks[4]
    logs[4].release_room()
    assert not room.held_bytes and not room.waiting


async def test_requests_that_wait_for_room_are_queued():
    room, queue = PromptScoresRoom(30.0, 1), Admissions(1)
    status = of_requests(WorkerStatus(), [], queue, room, RequestCounts())  # type: ignore[arg-type]
    assert status.queued == 0
    logs = [log_of() for _ in range(2)]
    tasks = [await enters(room, log, "t") for log in logs]
    status = of_requests(WorkerStatus(), [], queue, room, RequestCounts())  # type: ignore[arg-type]
    by_class, oldest, *_ = (one.read() for one in of_queue(queue, room, {}))
    assert status.queued == 1 and by_class == {"high": 0, "normal": 1, "batch": 0}
    assert queue.oldest_seconds() == 0.0 != oldest
    logs[0].release_room()
    await asyncio.gather(*tasks)
    logs[1].release_room()
