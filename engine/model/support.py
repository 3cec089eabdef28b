"""The table of docs/models.md: family × format × device × parallelism. Written by `python -m engine.model.support`."""

from __future__ import annotations

import sys
from pathlib import Path

from engine.attention.registry import CAPPED
from engine.model.families import ACTIVATIONS, FAMILIES, REFUSED

PAGE = Path(__file__).resolve().parents[2] / "docs" / "models.md"
BEGIN, END = "<!-- written by python -m engine.model.support -->", "<!-- end -->"
# By the column: the test that compares with Hugging Face.
TESTS = {
    "CPU, fp32": "tests/engine/test_parity.py::test_logits_are_the_references_at_every_position",
    "CPU, fp32, TP 2": "tests/engine/test_parity_ranks.py::test_two_ranks_give_the_output_of_one",
    "CPU, fp32, handed over, TP 1 ↔ 2": "tests/engine/test_parity_ranks.py::test_kv_is_handed_over_between_any_degrees",
}
WHOLE = {
    "whole experts over the ranks": "tests/engine/test_parity_ranks.py::"
    "test_ranks_of_whole_experts_give_the_output_of_one",
}
NOT_RUN = ("CPU, bf16", "CUDA, fp32 and bf16")
REFUSALS = {
    "quantised weights": "quantised checkpoints are not supported: use the unquantised one",
    "NVFP4": "NVFP4 weights are not supported, on no device: use a bf16 checkpoint",
    "MXFP8": "MXFP8 weights are not supported, on no device: use a bf16 checkpoint",
}


def table() -> str:
    columns = [*TESTS, *WHOLE, *NOT_RUN]
    lines = [f"| family | `architectures` | {' | '.join(columns)} |", "|---|---|" + "---|" * len(columns)]
    for name, one in FAMILIES.items():
        marks = ["✓"] * len(TESTS) + ["✓" if one.experts else ""] * len(WHOLE) + ["~"] * len(NOT_RUN)
        lines.append(f"| {one.title} | `{name}` | {' | '.join(marks)} |")
    lines += [f"| | `{name}` | ✗ {text}{' |' * len(columns)}" for name, text in REFUSED.items()]
    lines += [
        "",
        "| column | test |",
        "|---|---|",
        *(f"| {name} | `{test}` |" for name, test in {**TESTS, **WHOLE}.items()),
    ]
    lines += ["", "| ✗ for every family | the refusal |", "|---|---|"]
    lines += [f"| {name} | {text} |" for name, text in REFUSALS.items()]
    lines += [
        "",
        f"Activations: {', '.join(f'`{name}`' for name in ACTIVATIONS)}. Scores are capped (Gemma 2) by the "
        f"attention backends {', '.join(f'`{name}`' for name in CAPPED)}; others are refused for such a model.",
    ]
    return "\n".join(lines)


def page(text: str) -> str:
    """The page with its table as of now."""
    before, after = text.index(BEGIN) + len(BEGIN), text.index(END)
    return f"{text[:before]}\n\n{table()}\n\n{text[after:]}"


if __name__ == "__main__":
    new = page(PAGE.read_text())
    if "--check" in sys.argv and new != PAGE.read_text():
        sys.exit("docs/models.md is not as `python -m engine.model.support` writes it")
    PAGE.write_text(new)
