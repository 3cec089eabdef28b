"""Parts of a choice: markers reach the parser in their place, stop strings still count, resumed parts are not shown."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from router.dispatch.choice import ChoiceStream
from router.request.answer_parts import CallArguments, CallBegin, ContentText, ReasoningText
from router.request.completion import Completion
from wire import common_pb2

TEXTS = {1: "plan", 2: "say", 3: " STO", 4: "P it", 5: '{"a":1}'}
END_OF_REASONING, CALL, EOS = 90, 91, 99


class Parser:
    """Reasoning up to one marker; a second one begins a call."""

    def __init__(self):
        self.kind: Any = ReasoningText
        self.called = self.unfinished = False

    def feed(self, pieces):
        parts = []
        for piece in pieces:
            if piece == END_OF_REASONING:
                self.kind = ContentText
            elif piece == CALL:
                self.called = self.unfinished = True
                self.kind = lambda text: CallArguments(0, text)
                parts.append(CallBegin(0, "c", "f"))
            else:
                parts.append(self.kind(piece))
                self.unfinished &= not piece.endswith("}")
        return parts

    def end(self, *, cut=False):
        return [ContentText("?" if cut else "!")]


class Detokenizer:
    def __init__(self):
        self.incomplete = False

    def add(self, token_id):
        self.incomplete = token_id == 6
        return TEXTS.get(token_id, "")

    def complete(self):
        return "\ufffd" if self.incomplete else ""

    def flush(self):
        return ""


def choice(resumed=(), min_tokens: int = 0, **fields: Any) -> ChoiceStream:
    source = SimpleNamespace(marker_texts={END_OF_REASONING: "</think>", CALL: "<call>"}, parser=Parser)
    sampling = common_pb2.SamplingParams(min_tokens=min_tokens, max_tokens=9)
    completion = Completion(
        "r",
        "m",
        [0],
        sampling,
        resume_tokens=list(resumed),
        answer_format=source,
        **fields,
    )
    text: Any = SimpleNamespace(detokenizer=lambda prompt: Detokenizer())
    return ChoiceStream(0, completion, text)


def token(stream: ChoiceStream, token_id: int, finish: Any = 0) -> common_pb2.Token:
    return common_pb2.Token(position=stream.next_position, token_id=token_id, finish=finish)


def taken(stream: ChoiceStream, *ids: int, finish=common_pb2.FINISH_REASON_STOP):
    deltas = []
    for token_id in ids:
        end = finish if token_id == ids[-1] else 0
        delta = stream.take(token(stream, token_id, end))
        assert delta is not None
        deltas.append(delta)
    return deltas


def parts(deltas):
    return [part for delta in deltas for part in delta.parts or ()]


def test_parts_follow_the_markers():
    stream = choice()
    deltas = taken(stream, 1, END_OF_REASONING, 2, CALL, 5, EOS)
    assert parts(deltas) == [
        ReasoningText("plan"),
        ContentText("say"),
        CallBegin(0, "c", "f"),
        CallArguments(0, '{"a":1}'),
        ContentText("!"),
    ]
    assert "".join(delta.text for delta in deltas) == 'plansay{"a":1}'
    assert deltas[-1].finish == "tool_calls"
    assert stream.reasoning_tokens == 1


def test_a_choice_cut_by_its_length_says_so():
    deltas = taken(choice(), CALL, 5, finish=common_pb2.FINISH_REASON_LENGTH)
    assert deltas[-1].finish == "length" and parts(deltas)[-1] == ContentText("?")


@pytest.mark.parametrize("stop", ["STOX", "STOP"])
def test_a_stop_string_does_not_reach_over_a_marker(stop):
    """As in vLLM, whose text has the markers between the two."""
    stream = choice(stop=(stop,))
    deltas = taken(stream, 3, END_OF_REASONING, 4, EOS)
    assert parts(deltas)[:2] == [ReasoningText(" "), ReasoningText("STO")]
    assert parts(deltas)[2:] == [ContentText("P it"), ContentText("!")]
    assert deltas[-1].stop_string is None


@pytest.mark.parametrize("included", [False, True])
def test_a_stop_string_may_be_in_a_markers_text(included):
    stream = choice(stop=("zz", "call>"), include_stop_text=included)
    deltas = [stream.take(token(stream, one)) for one in (1, END_OF_REASONING, 2, CALL)]
    assert parts(deltas) == [ReasoningText("plan"), ContentText("say"), ContentText("?")]
    assert deltas[-1] is not None and (deltas[-1].finish, deltas[-1].stop_string) == ("stop", "call>")


def test_a_marker_before_the_end_is_read_once():
    assert parts(taken(choice(), CALL, EOS)) == [CallBegin(0, "c", "f"), ContentText("!")]


@pytest.mark.parametrize(
    ("ids", "finish"),
    [
        ((CALL, 3, 4), "stop"),
        ((CALL, 5, CALL, 3, 4), "stop"),
        ((CALL, 5, END_OF_REASONING, 3, 4), "tool_calls"),
    ],
)
def test_a_call_that_a_stop_string_cuts_is_no_reason_to_finish(ids, finish):
    stream = choice(stop=("STOP",))
    deltas = [stream.take(token(stream, one)) for one in ids]
    assert deltas[-1] is not None and (deltas[-1].finish, deltas[-1].stop_string) == (finish, "STOP")


def test_a_call_that_the_model_leaves_open_is_one():
    assert taken(choice(), CALL, 3, EOS)[-1].finish == "tool_calls"


def test_stop_strings_are_searched_in_reasoning_and_calls():
    for before in ((), (END_OF_REASONING,), (CALL,)):
        stream = choice(stop=("STOP",))
        deltas = [stream.take(token(stream, one)) for one in (*before, 3, 4)]
        assert deltas[-1] is not None and deltas[-1].stop_string == "STOP"


async def test_a_resumed_choice_has_no_stop_string_over_a_marker_either():
    stream = choice([3, CALL], stop=("STOP",))
    await stream.read_resumed()
    assert taken(stream, 4, EOS)[-1].stop_string is None


def test_an_incomplete_character_precedes_the_marker():
    assert parts(taken(choice(), 6, END_OF_REASONING, 2, EOS))[:2] == [
        ReasoningText("\ufffd"),
        ContentText("say"),
    ]


async def test_resumed_parts_are_not_shown_again():
    whole = parts(taken(choice(), 1, END_OF_REASONING, 2, CALL, 5, EOS))
    stream = choice([1, END_OF_REASONING, 2])
    await stream.read_resumed()
    assert parts(taken(stream, CALL, 5, EOS)) == whole[2:]
    assert stream.reasoning_tokens == 1


def test_without_a_parser_there_are_no_parts():
    text: Any = SimpleNamespace(detokenizer=lambda prompt: Detokenizer())
    stream = ChoiceStream(0, Completion("r", "m", [0], common_pb2.SamplingParams()), text)
    (delta,) = taken(stream, 1)
    assert delta.parts is None
    assert stream.reasoning_tokens == 0


def test_the_last_delta_names_the_stop_string():
    text: Any = SimpleNamespace(detokenizer=lambda prompt: Detokenizer())
    plain = Completion("r", "m", [0], common_pb2.SamplingParams(), stop=("never", "STOP"))
    for stream in (choice(stop=("never", "STOP")), ChoiceStream(0, plain, text)):
        deltas: list[Any] = [stream.take(token(stream, one)) for one in (1, 3, 4)]
        assert [delta.stop_string for delta in deltas] == [None, None, "STOP"]
        assert deltas[-1].finish == "stop"


@pytest.mark.parametrize(("ids", "shown"), [((1, 2, 2, 2), "plansaysay"), ((2, 2, 3, 4), "saysay ")])
def test_a_stop_string_ends_no_answer_before_min_tokens(ids, shown):
    """One that begins within the first tokens and is complete behind them does, as in vLLM."""
    stream = choice(stop=("say", "STOP"), min_tokens=3)
    deltas = [stream.take(token(stream, one)) for one in ids]
    assert [delta.finish for delta in deltas if delta is not None] == [None, None, None, "stop"]
    assert "".join(delta.text for delta in deltas if delta is not None) == shown


@pytest.mark.parametrize(
    ("min_tokens", "finish", "shown"), [(3, "length", "plan\ufffd"), (0, "stop", "plan")]
)
def test_nor_does_one_in_what_is_left_at_the_end(min_tokens, finish, shown):
    """Of a character that the last token leaves incomplete."""
    stream = choice(stop=("\ufffd",), min_tokens=min_tokens)
    stream._detokenizer.flush = lambda: "\ufffd"  # type: ignore[method-assign]
    deltas = [
        stream.take(token(stream, one, end)) for one, end in ((1, 0), (9, common_pb2.FINISH_REASON_LENGTH))
    ]
    assert deltas[-1] is not None and deltas[-1].finish == finish
    assert "".join(delta.text for delta in deltas if delta is not None) == shown


def test_nor_does_one_in_a_markers_text():
    for min_tokens, finish in ((1, None), (0, "stop")):
        stream = choice(stop=("call>",), min_tokens=min_tokens)
        delta = stream.take(token(stream, CALL))
        assert delta is not None and delta.finish == finish


async def test_min_tokens_count_those_of_a_resumed_answer():
    stream = choice([2, 2], stop=("say",), min_tokens=2)
    await stream.read_resumed()
    delta = stream.take(token(stream, 2))
    assert delta is not None and (delta.finish, delta.text) == ("stop", "")
