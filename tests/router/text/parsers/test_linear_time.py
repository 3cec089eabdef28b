"""The work of parsing an answer is linear in its length."""

from __future__ import annotations

import json
import time

import pytest

from router.text.parsers.reasoning.gpt_oss import MAX_HEADER, GptOss
from router.text.parsers.registry import TOOL_PARSERS
from router.text.parsers.stream import MAX_SPACE, JsonValue
from tests.router.text.parsers.parsed_answers import SPECIAL, made, read


@pytest.mark.parametrize("tools", TOOL_PARSERS)
@pytest.mark.parametrize(
    "text", ["<tool_call>{", "{" * 10, "[" * 10, "<tool_call", '[TOOL_CALLS][{"name"', "<think>", " ", '{"name": "'],
)  # fmt: skip
def test_time_is_linear(tools, text):
    """A bound on processor time, far above what 200 KB take."""
    parser = made(tools, "gpt_oss" if tools == "gpt_oss" else "think", False)
    flood = text * (200_000 // len(text))
    began = time.process_time()
    for begin in range(0, len(flood), 16):
        parser.feed([flood[begin : begin + 16]])
    parser.end()
    assert time.process_time() - began < 2.0


@pytest.mark.parametrize(
    ("begin", "shown"),
    [
        ("", ""),
        ("<|python_tag|>", "<|python_tag|>"),
        ('{"name": "f", "parameters": {}}', ""),
        ('{"name": "f", "parameters": {}};', ";"),
        ('{"name": "f", "parameters": {}}; <|python_tag|>', "; <|python_tag|>"),
    ],
)
@pytest.mark.parametrize("piece", [1, MAX_SPACE, MAX_SPACE + 1])
def test_white_space_before_a_call_is_held_up_to_its_bound(begin, shown, piece):
    """Longer, it is content: what is held is copied with each token."""
    called = begin.startswith("{")
    for count in (MAX_SPACE, MAX_SPACE + 1):
        space, parser = " " * count, made("llama3_json", "", False)
        parser.feed([begin])
        parts = [part for at in range(0, count, piece) for part in parser.feed([space[at : at + piece]])]
        text = "" if count <= MAX_SPACE else (shown + space).lstrip() if called else shown + space
        assert "".join(part.text for part in parts) == text


@pytest.mark.parametrize("tools", TOOL_PARSERS)
def test_one_long_piece_takes_linear_time_too(tools):
    parser = made(tools, tools if tools == "gpt_oss" else "think", False)
    began = time.process_time()
    parser.feed(["<|start|><tool_call>[TOOL_CALLS][" * 10_000])
    parser.end()
    assert time.process_time() - began < 2.0


@pytest.mark.parametrize("at_once", [False, True])
def test_a_flood_of_markers_ends(at_once, monkeypatch):
    """Each is looked at with a header's length of those before it, twice at most, and the message behind them is read."""
    seen, count = [], 600
    real = GptOss._in_header

    def counted(self, text):
        seen.append(len(text))
        assert len(seen) <= 2 * count + 4, "a header that is given up begins again"
        return real(self, text)

    monkeypatch.setattr(GptOss, "_in_header", counted)
    flood = count * [SPECIAL["<|start|>"]]
    message: list[str | int] = [
        SPECIAL["<|channel|>"],
        "final",
        SPECIAL["<|message|>"],
        "hi",
        SPECIAL["<|end|>"],
    ]
    parser = made("gpt_oss", "gpt_oss", False, SPECIAL)
    parts = [
        part for pieces in ([flood] if at_once else [[one] for one in flood]) for part in parser.feed(pieces)
    ]
    assert not parts and read(parser, message) == ("", "hi", [])
    assert sum(seen) < 2 * count * (MAX_HEADER + 16)


def test_a_long_list_of_calls_is_read_as_it_comes():
    """No piece's work grows with the text before it, and nothing is left for the end: 16 KiB took 40 ms at once."""
    parser, spent = made("pythonic", "", False), []
    text = "[f(a=[" + "[],{'k': 1}, " * 1200 + "])]"
    assert 15_000 < len(text) <= 16_384
    pieces = [text[begin : begin + 256] for begin in range(0, len(text), 256)]
    for work in (*(lambda piece=piece: parser.feed([piece]) for piece in pieces), parser.end):
        began = time.process_time()
        parts = work()
        spent.append(time.process_time() - began)
    assert len(parts) == 2 and len(json.loads(parts[1].text)["a"]) == 2400
    assert sorted(spent)[-3] < 0.01, (
        "far above the 0.5 ms of such a piece: two may meet a collection of garbage"
    )


def test_names_of_characters_are_searched_in_linear_time():
    parser = made("pythonic", "", False)
    began = time.process_time()
    parser.feed(['[f(a="' + "\\N{" * 5000 + '")]'])
    parser.end()
    assert time.process_time() - began < 0.02, "quadratic, it took 45 ms"
    assert read(made("pythonic", "", False), ["[f(a='\\N{EURO SIGN}')]"])[2] == [("f", '{"a": "€"}')]


@pytest.mark.parametrize("tools", ["hermes", "llama3_json", "mistral"])
def test_the_head_of_a_call_is_read_once(monkeypatch, tools):
    """Not again from its beginning for each token."""
    seen: list[int] = []
    real = JsonValue.end

    def counted(self, text):
        seen.append(len(text))
        return real(self, text)

    monkeypatch.setattr(JsonValue, "end", counted)
    before = {"hermes": "<tool_call>", "mistral": "[TOOL_CALLS]["}.get(tools, "")
    head = '{"id": "' + "x" * 900 + '", "name": "f", "parameters": '
    assert read(made(tools, "", False), list(before + head + "{}}"))[2] == [("f", "{}")]
    assert sum(seen) < 2 * len(head)
