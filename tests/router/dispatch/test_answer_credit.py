"""How far a worker may send each choice: a window beyond what the client has read, and no token further."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from cluster.protocol.link import MIN_WINDOW_TOKENS, WINDOW_TOKENS, window_of
from router.dispatch.answer_credit import AnswerCredit
from router.dispatch.choice import ChoiceStream
from router.link.token import PlainToken
from router.request.completion import Completion
from wire import common_pb2

PROMPT, RESUMED = 9, 4
FIRST = PROMPT + RESUMED  # the position of the first token that comes
STOP = 99
COUNTS = [1, 2, 3, 16, 128]


class Detokenizer:
    def add(self, token_id: int) -> str:
        return "STOP" if token_id == STOP else "a"

    def flush(self) -> str:
        return ""


class Answer:
    """The choices of an attempt that resumes an answer, their credit, and what the worker was told of it."""

    def __init__(self, count: int, first_choice: int = 0) -> None:
        sampling = common_pb2.SamplingParams(max_tokens=4 * WINDOW_TOKENS)
        completion = Completion(
            "r", "m", [1] * PROMPT, sampling, n=count, stop=("STOP",), resume_tokens=[5] * RESUMED
        )
        text: Any = SimpleNamespace(detokenizer=lambda prompt: Detokenizer())
        self.choices = [ChoiceStream(first_choice + i, completion, text) for i in range(count)]
        self.credit = AnswerCredit(self.choices)
        self.window = window_of(count)
        self.quarter = self.window // 4

    def comes(self, number: int, tokens: int = 1, token_id: int = 5) -> list[bool]:
        """The next tokens of a choice as its worker counts them: whether each makes a grant due."""
        choice, due = self.choices[number], []
        at = self.credit.positions()[number]
        for position in range(at, at + tokens):
            token = PlainToken(choice.index, position, token_id)
            due.append(self.credit.received())
            if choice.take(token) is None:
                self.credit.was_not_wanted(token)
        return due

    def granted(self) -> dict[int, int]:
        """The limits that the worker is told, by choice."""
        told: list[tuple[int, int]] = []
        self.credit.grant(lambda choice, limit: told.append((choice, limit)))
        assert len(dict(told)) == len(told), "each choice once"
        return dict(told)


@pytest.mark.parametrize("count", COUNTS)
def test_at_first_each_choice_has_the_window_that_its_worker_starts_with(count: int) -> None:
    """And a token breaks the attempt a whole window behind the first one: what a worker of link version 1 may send."""
    answer = Answer(count, first_choice=7)
    assert answer.credit.positions() == [FIRST] * count
    assert answer.credit.limits() == [FIRST + answer.window] * count
    assert answer.credit.bounds == dict.fromkeys(range(7, 7 + count), FIRST + WINDOW_TOKENS)
    assert answer.granted() == {}, "nothing has come"


def test_an_attempt_without_choices_is_granted_nothing() -> None:
    """Only its prompt is wanted."""
    answer = Answer(0)
    assert (answer.credit.positions(), answer.credit.limits(), answer.credit.bounds) == ([], [], {})
    assert answer.granted() == {}


@pytest.mark.parametrize("count", COUNTS)
def test_a_choice_is_granted_a_window_beyond_what_was_read_from_a_quarter_on(count: int) -> None:
    answer = Answer(count, first_choice=7)
    answer.comes(0, answer.quarter - 1)
    assert answer.granted() == {}, "one token less than a quarter"
    answer.comes(0)
    assert answer.granted() == {7: FIRST + answer.quarter + answer.window}, "to that choice alone"
    assert answer.granted() == {}, "once"
    answer.comes(0, answer.quarter - 1)
    assert answer.granted() == {}, "counted from the last grant"
    others = [FIRST + answer.window] * (count - 1)
    assert answer.credit.limits() == [FIRST + answer.quarter + answer.window, *others]


@pytest.mark.parametrize("count", COUNTS)
def test_the_bound_is_a_whole_window_beyond_what_was_read_at_the_grant(count: int) -> None:
    """It moves with the limit, and by nothing else: tokens that come do not move it."""
    answer = Answer(count)
    answer.comes(0, answer.window)
    assert answer.credit.bounds[0] == FIRST + WINDOW_TOKENS
    answer.granted()
    assert answer.credit.bounds[0] == FIRST + answer.window + WINDOW_TOKENS
    beyond = {
        bound - limit
        for bound, limit in zip(answer.credit.bounds.values(), answer.credit.limits(), strict=True)
    }
    assert beyond == {WINDOW_TOKENS - answer.window}


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("together", [True, False], ids=["all choices", "one choice"])
def test_a_grant_is_due_once_before_a_window_is_used_up(count: int, together: bool) -> None:
    """Of each choice it may be a quarter by then; where one choice goes on alone, a quarter of its window is left."""
    answer = Answer(count)
    due: list[bool] = []
    while not any(due):
        for number in range(count if together else 1):
            due += answer.comes(number)
    needed = min(count * answer.quarter, answer.window - answer.quarter)
    assert due.index(True) == needed - 1, "neither for each token nor too late"
    read = answer.credit.positions()[0] - FIRST
    assert read <= answer.window - answer.quarter
    assert sum(answer.comes(0, answer.window - read)) == 0, (
        "due once, however much more comes before it is read"
    )
    assert answer.granted()[0] == FIRST + 2 * answer.window


@pytest.mark.parametrize("count", [1, 16])
def test_a_grant_that_is_due_is_due_again_after_as_many_tokens(count: int) -> None:
    answer = Answer(count)
    first = answer.comes(0, answer.window).index(True)
    answer.granted()
    again = answer.comes(0, answer.window)
    assert again.index(True) == first and sum(again) == 1


def test_many_choices_have_the_smallest_window_each() -> None:
    answer = Answer(128)
    assert answer.window == MIN_WINDOW_TOKENS
    assert sum(answer.credit.limits()) - 128 * FIRST == 128 * MIN_WINDOW_TOKENS


def test_a_choice_that_a_stop_string_ended_is_granted_what_came_unwanted() -> None:
    """Its worker goes on with it, and with a full window it would pause the other choice."""
    answer = Answer(2)
    answer.comes(0, token_id=STOP)
    assert answer.choices[0].finish == "stop"
    answer.comes(0, answer.quarter - 2)
    assert answer.granted() == {}
    answer.comes(0)
    assert answer.credit.positions() == [FIRST + answer.quarter, FIRST]
    assert answer.granted() == {0: FIRST + answer.quarter + answer.window}


def test_a_repeated_token_takes_nothing_back() -> None:
    """A worker whose link broke sends again what was not acknowledged."""
    answer = Answer(1)
    answer.comes(0, token_id=STOP)
    answer.comes(0, 3 * answer.quarter)
    before = answer.credit.positions()
    answer.credit.was_not_wanted(PlainToken(0, FIRST + 1, 5))
    assert answer.credit.positions() == before


def test_tokens_that_a_running_choice_does_not_want_grant_it_nothing() -> None:
    """They came before: its own position counts, so that a worker cannot move its limit by sending anything."""
    answer = Answer(1)
    answer.comes(0, 2)
    for position in (FIRST, FIRST + 3 * answer.window):
        answer.credit.was_not_wanted(PlainToken(0, position, 5))
    assert answer.credit.positions() == [FIRST + 2]
    assert answer.granted() == {} and answer.credit.bounds == {0: FIRST + WINDOW_TOKENS}


@pytest.mark.parametrize("count", COUNTS)
def test_repeated_limits_are_those_that_were_granted(count):
    answer = Answer(count, first_choice=3)
    told: list[tuple[int, int]] = []
    answer.credit.repeat(lambda choice, limit: told.append((choice, limit)))
    assert told == [(choice.index, FIRST + answer.window) for choice in answer.choices]
    answer.comes(0, answer.quarter)
    granted = answer.granted()
    assert granted == {3: FIRST + answer.quarter + answer.window}
    told.clear()
    answer.credit.repeat(lambda choice, limit: told.append((choice, limit)))
    assert dict(told) == {choice.index: FIRST + answer.window for choice in answer.choices} | granted
