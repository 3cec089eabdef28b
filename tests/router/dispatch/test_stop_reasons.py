"""What of the request has ended a choice: vLLM's `stop_reason`."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from router.dispatch.choice import ChoiceStream
from router.request.answer_parts import ContentText
from router.request.completion import Completion, Delta
from wire import common_pb2

STOP, LENGTH = common_pb2.FINISH_REASON_STOP, common_pb2.FINISH_REASON_LENGTH
STOP_ID, EOS = 7, 99
TEXTS = {1: "one", 2: " two", STOP_ID: " seven"}


class Detokenizer:
    def add(self, token_id: int) -> str:
        return TEXTS.get(token_id, "")

    def flush(self) -> str:
        return ""


class Parser:
    called = unfinished = False

    def feed(self, pieces: Any) -> Any:
        return [ContentText(piece) for piece in pieces]

    def end(self, *, cut: bool = False) -> Any:
        return []


def last_delta(
    token_id: int, finish: Any, *, parsed: bool, stop: Any = (), keeps: bool = False, **sampling: Any
) -> Delta:
    ids = [STOP_ID, 0, EOS]
    completion = Completion(
        *("r", "m", [0], common_pb2.SamplingParams(max_tokens=9, stop_token_ids=ids, **sampling)),
        stop=stop,
        include_stop_text=keeps,
        answer_format=SimpleNamespace(marker_texts={}, parser=Parser) if parsed else None,  # type: ignore[arg-type]
    )
    text: Any = SimpleNamespace(detokenizer=lambda prompt: Detokenizer(), eos_token_ids=(EOS,))
    stream = ChoiceStream(0, completion, text)
    first = stream.take(common_pb2.Token(position=1, token_id=1))
    assert first is not None and first.stop_reason is None
    delta = stream.take(common_pb2.Token(position=2, token_id=token_id, finish=finish))
    assert delta is not None and delta.finish is not None
    return delta


@pytest.mark.parametrize("parsed", [False, True])
def test_a_stop_id_is_named_and_an_end_of_the_model_is_not(parsed: bool) -> None:
    """Also not where a request lists that one: it would have ended the choice anyway."""
    assert last_delta(STOP_ID, STOP, parsed=parsed).stop_reason == STOP_ID
    assert last_delta(0, STOP, parsed=parsed).stop_reason == 0
    assert last_delta(EOS, STOP, parsed=parsed).stop_reason is None
    assert last_delta(EOS, STOP, parsed=parsed, ignore_eos=True).stop_reason == EOS
    assert last_delta(2, LENGTH, parsed=parsed).stop_reason is None
    assert last_delta(STOP_ID, LENGTH, parsed=parsed).stop_reason is None, "min_tokens kept it from ending"


@pytest.mark.parametrize("parsed", [False, True])
def test_a_stop_string_is_named(parsed: bool) -> None:
    found = last_delta(2, LENGTH, parsed=parsed, stop=("two",))
    assert (found.finish, found.stop_reason) == ("stop", "two")
    assert last_delta(STOP_ID, STOP, parsed=parsed, stop=("two",)).stop_reason == STOP_ID


@pytest.mark.parametrize("parsed", [False, True])
def test_the_text_of_a_stop_id_is_kept_where_that_of_a_stop_string_is(parsed: bool) -> None:
    for keeps, text in ((False, ""), (True, " seven")):
        ended = last_delta(STOP_ID, STOP, parsed=parsed, keeps=keeps)
        assert (ended.text, ended.finish, ended.stop_reason) == (text, "stop", STOP_ID)
        both = last_delta(STOP_ID, STOP, parsed=parsed, keeps=keeps, stop=("seven",))
        assert (both.text, both.stop_reason) == (text, STOP_ID), "the token ended it"
        if parsed:
            assert ended.parts == ((ContentText(text),) if text else ())
