"""What a comparison with other servers shows after each round: medians, and ratios within rounds."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from bench.load import checked
from bench.peers import _tables, figures

MEASURED = {
    "vLLM": {"TTFT, 512 tokens": [0.5, 0.8, 0.4], "concurrent8, output": [100.0, 50.0, 80.0]},
    "llama.cpp, bf16": {"TTFT, 512 tokens": [1.0, 1.0, 1.0], "concurrent8, output": [50.0, 50.0, 50.0]},
    "Baton, aggregated": {"TTFT, 512 tokens": [0.4, 0.4, 0.4], "concurrent8, output": [120.0, 75.0, 80.0]},
}


def test_each_of_ours_has_its_median_and_its_ratio_to_each_peer_within_rounds():
    lines = list(_tables(MEASURED))
    assert lines[0] == "| median | vLLM | llama.cpp, bf16 | Baton, aggregated |"
    assert lines[2] == "| TTFT, 512 tokens | 500 ms | 1,000 ms | 400 ms |"
    assert lines[3] == "| concurrent8, output | 80 tok/s | 50 tok/s | 80 tok/s |"
    assert lines[5] == "| Baton, aggregated, over | vLLM | llama.cpp, bf16 |"
    # 0.4 / 0.5, 0.4 / 0.8 and 0.4 / 0.4: the median is a round's own ratio, not that of the medians
    assert lines[7].startswith("| TTFT, 512 tokens | 0.80 (") and lines[7].endswith(
        " | 0.40 (0.40 to 0.40) |"
    )
    assert lines[8].startswith("| concurrent8, output | 1.20 (")


def test_without_a_peer_there_are_medians_only():
    lines = list(_tables({"Baton, aggregated": MEASURED["Baton, aggregated"]}))
    assert len(lines) == 4 and lines[0] == "| median | Baton, aggregated |"


def test_figures_name_the_peers_of_ours_and_none_of_a_peers():
    notes = {figure.name: figure.note for figure in figures(MEASURED)}
    assert notes["vLLM: TTFT, 512 tokens"] == ""
    assert notes["Baton, aggregated: TTFT, 512 tokens"].startswith("vLLM: 0.80 (")
    assert "llama.cpp, bf16: 0.40 (0.40 to 0.40)" in notes["Baton, aggregated: TTFT, 512 tokens"]


@pytest.mark.parametrize("errors", [{"no_tokens": 3}, {"no_tokens": 2, "timeout": 1}, {"timeout": 1}])
def test_more_failures_than_a_few_empty_answers_end_a_comparison(errors):
    report: Any = SimpleNamespace(failed=sum(errors.values()), requests=64, errors=errors)
    with pytest.raises(RuntimeError, match="of 64 requests failed"):
        checked(report, may_be_empty=2)


def test_a_few_answers_may_be_empty_only_where_that_is_said():
    report: Any = SimpleNamespace(failed=2, requests=64, errors={"no_tokens": 2})
    assert checked(report, may_be_empty=2) is report
    with pytest.raises(RuntimeError):
        checked(report)
