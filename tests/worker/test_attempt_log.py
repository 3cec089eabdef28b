"""The log of an attempt: what is kept, what may be sent, where a reader may continue."""

from __future__ import annotations

import gc
import sys

import pytest

from cluster.protocol.link import WINDOW_TOKENS
from wire import common_pb2
from worker.attempt_log import AttemptLog

SPEC = common_pb2.GenerateSpec(prompt_tokens=bytes(4 * 3), output_tokens=bytes(4 * 2))
FIRST = 5  # position of the next token of SPEC


def log_of(choices: int = 1) -> AttemptLog:
    spec = common_pb2.GenerateSpec()
    spec.CopyFrom(SPEC)
    spec.n = choices
    return AttemptLog.of(spec, lambda: None)


def done() -> common_pb2.AttemptEnd:
    return common_pb2.AttemptEnd(outcome=common_pb2.ATTEMPT_OUTCOME_DONE)


def test_positions_begin_behind_prompt_and_output():
    log = log_of()
    log.add(0, FIRST, 7)
    with pytest.raises(ValueError, match="position 5 came, 6 was next"):
        log.add(0, FIRST, 7)
    with pytest.raises(ValueError, match="position 8 came, 6 was next"):
        log.add(0, FIRST + 3, 7)
    (choice,) = log.choices
    assert (choice.first, choice.tokens, choice.end) == (FIRST, [7], FIRST + 1)


def test_a_full_window_of_one_choice_fills_the_log():
    log = log_of(2)
    for i in range(WINDOW_TOKENS // 2):
        assert not log.full
        log.add(1, FIRST + i, i)
    assert log.full
    assert log.credit(1, FIRST + 10 + WINDOW_TOKENS // 2) and not log.full


def test_an_older_limit_that_comes_late_takes_no_credit_back():
    log = log_of()
    assert log.credit(0, FIRST + WINDOW_TOKENS) is False, "what it has from the start"
    for i in range(40):
        log.add(0, FIRST + i, i)
    assert log.credit(0, FIRST + 30 + WINDOW_TOKENS)
    assert not log.credit(0, FIRST + 20 + WINDOW_TOKENS) and not log.credit(0, 0)
    assert log.choices[0].limit == FIRST + 30 + WINDOW_TOKENS


def test_acknowledged_tokens_and_their_log_probabilities_are_dropped():
    log = log_of()
    for i in range(20):
        token = common_pb2.Token(position=FIRST + i, token_id=i, logprob=-1.0)
        log.add(0, FIRST + i, i, token)
    (choice,) = log.choices
    choice.sent = FIRST + 20
    assert log.credit(0, FIRST + 15 + WINDOW_TOKENS)
    assert choice.tokens == [15, 16, 17, 18, 19]
    assert sorted(choice.extras) == [FIRST + i for i in range(15, 20)]


def test_behind_a_token_with_more_than_its_id_follow_only_such():
    """A frame's columns are read before its extras."""
    log = log_of()
    log.add(0, FIRST, 1)
    log.add(0, FIRST + 1, 2, common_pb2.Token(position=FIRST + 1, token_id=2, logprob=-1.0))
    log.add(0, FIRST + 2, 3)
    (choice,) = log.choices
    assert sorted(choice.extras) == [FIRST + 1, FIRST + 2]


@pytest.mark.parametrize("position", [FIRST - 1, FIRST + 3])
def test_a_reader_that_asks_for_a_dropped_position_is_refused(position):
    log = log_of()
    for i in range(8):
        log.add(0, FIRST + i, i)
    assert log.credit(0, FIRST + 4 + WINDOW_TOKENS)
    assert not log.resume([position], [WINDOW_TOKENS])
    assert not log.resume([], []) and not log.resume([FIRST + 5, 9], [300, 300])


def test_a_reader_continues_where_it_asks_or_at_the_end_of_what_is_there():
    log = log_of()
    for i in range(8):
        log.add(0, FIRST + i, i)
    (choice,) = log.choices
    choice.sent = FIRST + 8
    assert log.resume([FIRST + 2], [FIRST + WINDOW_TOKENS])
    assert choice.sent == FIRST + 2
    assert log.resume([FIRST + 9], [FIRST + WINDOW_TOKENS]), (
        "the prefill worker has sent a token before this one"
    )
    assert choice.sent == FIRST + 8


def test_only_the_first_end_counts():
    log = log_of()
    log.end(done())
    log.end(common_pb2.AttemptEnd(outcome=common_pb2.ATTEMPT_OUTCOME_ABORTED))
    assert log.ended and log.end_event == done()


def test_every_change_is_reported():
    changes: list[int] = []
    log = AttemptLog(0, 1, FIRST, lambda: changes.append(1))
    log.add(0, FIRST, 1)
    log.end(done())
    log.end(done())
    assert len(changes) == 2


def test_tokens_that_were_acknowledged_are_not_kept():
    log, count = log_of(), 10_000
    gc.collect()
    before = sys.getallocatedblocks()
    for i in range(count):
        log.add(0, FIRST + i, i + 1000)
        (choice,) = log.choices
        choice.sent = choice.end
        log.credit(0, choice.end + WINDOW_TOKENS)
    gc.collect()
    assert sys.getallocatedblocks() - before < count / 100
    assert log.count == count and log.all_sent


def test_tokens_of_a_log_that_is_due_are_not_reported_again():
    """A step makes tokens for many choices; its link is told once for the next frame."""
    changes: list[int] = []
    log = AttemptLog(0, 2, FIRST, lambda: changes.append(1))
    log.add(0, FIRST, 1)
    log.is_due = True
    log.add(1, FIRST, 1)
    assert len(changes) == 1
    log.end(done())
    assert len(changes) == 2


def test_a_token_that_the_router_has_from_elsewhere_is_not_sent():
    """The prefill worker sends the first one too, and the router's credit may come before it leaves here."""
    log = log_of()
    log.add(0, FIRST, 7)
    assert log.credit(0, FIRST + 1 + WINDOW_TOKENS)
    assert log.all_sent and not log.may_send
    log.add(0, FIRST + 1, 8)
    (choice,) = log.choices
    assert (choice.sent, choice.tokens[choice.sent - choice.first]) == (FIRST + 1, 8)
