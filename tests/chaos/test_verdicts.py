"""What a campaign counts as failed, and wrong tokens that are judged once more."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from tests.chaos import evidence
from tests.chaos.campaign import failed_streams
from tests.chaos.checker import Verdict
from tests.chaos.evidence import judged_again, keep
from tests.chaos.requests import Request
from tests.chaos.results import Result
from tests.chaos.streams import Outcome, Stream

REQUEST = Request([3, 4, 5], 8, 0.0, 1.0, 0, 1)


def ended(outcome: Outcome, *, asked: bool = False, router: str = "") -> Stream:
    stream = Stream("openai" if router else "baton", REQUEST, router)
    stream.cancel_asked = asked
    stream.end(outcome)
    return stream


def test_a_stream_that_is_broken_off_counts_as_failed_unless_its_client_cancelled() -> None:
    done, left = ended("done"), ended("cancelled", asked=True)
    failed, broken_off = ended("error"), ended("cancelled")
    hit, spared = ended("error", router="http://a"), ended("error", router="http://b")
    errors, of_the_victim = failed_streams([done, left, failed, broken_off, hit, spared], ["http://a"])
    assert errors == [failed, broken_off, spared]
    assert of_the_victim == [hit]


def result(wrong: int) -> Result:
    return Result("s", 7, "kill decode", 0.0, 1, 1, 2, 16, 0, 0, wrong, 0, [], 0, 0.0, 0.0, 0.0)


@pytest.mark.parametrize(("again", "left"), [((), [0]), ((2,), [1]), ((1, 2), [])])
def test_wrong_tokens_that_a_corrected_judge_accepts_are_taken_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, again: tuple[int, ...], left: list[int]
) -> None:
    stream = ended("done")
    stream.tokens, stream.verdict = [1] * 8, Verdict(8, 0, (1, 2))
    keep(tmp_path / "wrong.jsonl", "s", 7, stream)
    monkeypatch.setattr(evidence, "judge_stream", lambda *_: Verdict(8, 2 - len(again), again))
    changed = judged_again(tmp_path / "wrong.jsonl", "s", tmp_path, [result(2)])
    assert [one.wrong for one in changed] == left


def test_wrong_tokens_whose_streams_are_missing_stay_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "wrong.jsonl"
    assert judged_again(file, "s", tmp_path, [result(2)]) == [], "the file is gone"
    stream = ended("done")
    stream.tokens, stream.verdict = [1] * 8, Verdict(8, 0, (1, 2))
    file.write_text(json.dumps({"run": "s", "number": 8, "stream": asdict(stream)}) + "\n")
    monkeypatch.setattr(evidence, "judge_stream", lambda *_: Verdict(8, 2, ()))
    assert judged_again(file, "s", tmp_path, [result(2)]) == [], "those of another fault"
