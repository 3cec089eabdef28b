"""The table of docs/models.md: family × format × device × parallelism. Written by `python -m engine.model.support`."""

from __future__ import annotations

import sys
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from cluster.protocol.kv_format import SCALE_BYTES
from cluster.protocol.model_limits import WRAPPERS
from engine.attention.registry import WITH_FEATURES
from engine.model.families import FAMILIES
from engine.model.family import ACTIVATIONS
from engine.quant import formats

PAGE = Path(__file__).resolve().parents[2] / "docs" / "models.md"
BEGIN, END = "<!-- written by python -m engine.model.support -->", "<!-- end -->"
_DENSE = tuple(name for name, one in FAMILIES.items() if one.experts is None)


@dataclass(frozen=True)
class Column:
    """`families`: architectures that the test compares with Hugging Face. `otherwise`: the mark of others."""

    test: str
    families: Collection[str] = tuple(FAMILIES)
    otherwise: str = "~"
    refused: Collection[str] = ()

    def mark(self, name: str) -> str:
        return "✓" if name in self.families else "✗" if name in self.refused else self.otherwise


COLUMNS = {
    "CPU, fp32": Column(
        "tests/engine/model/test_parity.py::test_logits_are_the_references_at_every_position"
    ),
    "TP 2": Column("tests/engine/model/test_parity_ranks.py::test_two_ranks_give_the_output_of_one"),
    "handed over, TP 1 ↔ 2": Column(
        "tests/engine/model/test_parity_ranks.py::test_kv_is_handed_over_between_any_degrees"
    ),
    "CPU, int8 (W8A8)": Column(
        "tests/engine/quant/test_int8.py::test_models_are_those_of_the_reference",
        tuple(name for name in _DENSE if name not in WRAPPERS),
        refused=tuple(name for name in FAMILIES if name not in _DENSE),
    ),
    "handed over between processes": Column(
        "tests/end_to_end/test_handover.py::test_tokens_equal_the_reference_after_a_handover",
        (*_DENSE, "MixtralForCausalLM", "Qwen3MoeForCausalLM", "GptOssForCausalLM"),
    ),
    "whole experts over the ranks": Column(
        "tests/engine/model/test_parity_ranks.py::test_ranks_of_whole_experts_give_the_output_of_one",
        tuple(name for name in FAMILIES if name not in _DENSE),
        "",
    ),
    "CPU, bf16": Column(
        "tests/engine/model/test_parity_bf16.py::test_logits_are_as_near_as_the_references",
        (
            "LlamaForCausalLM",
            "Qwen3ForCausalLM",
            "Gemma2ForCausalLM",
            "Gemma3ForCausalLM",
            "MixtralForCausalLM",
            "Qwen3MoeForCausalLM",
            "GptOssForCausalLM",
        ),
    ),
}
_INT8_KV = f"1 byte and {SCALE_BYTES} for each token, head and layer, K and V"
NOT_RUN = ("CUDA, fp32 and bf16",)


def table() -> str:
    columns = [*COLUMNS, *NOT_RUN]
    lines = [f"| family | `architectures` | {' | '.join(columns)} |", "|---|---|" + "---|" * len(columns)]
    for name, family in FAMILIES.items():
        marks = [one.mark(name) for one in COLUMNS.values()] + ["~"] * len(NOT_RUN)
        lines.append(f"| {family.title} | `{name}` | {' | '.join(marks)} |")
    lines += [
        "",
        "| column | test |",
        "|---|---|",
        *(f"| {name} | `{one.test}` |" for name, one in COLUMNS.items()),
    ]
    lines += ["", *formats_table()]
    lines += [
        "",
        f"Activations: {', '.join(f'`{name}`' for name in ACTIVATIONS)}; for gpt-oss, clamped SwiGLU. "
        f"The attention backends {', '.join(f'`{name}`' for name in WITH_FEATURES)} implement",
        "soft caps of scores (Gemma 2) and attention sinks (gpt-oss); other backends are refused for these models.",
        "",
        "| KV cache | CPU | CUDA |",
        "|---|---|---|",
        "| as `--dtype` (`--kv-dtype` auto; bf16 also by name) | 2 or 4 bytes | 2 or 4 bytes |",
        f"| `--kv-dtype int8`, every family | {_INT8_KV} | {_INT8_KV} |",
    ]
    return "\n".join(lines)


def formats_table() -> list[str]:
    """Format × device: how it is computed, with the bytes of a weight."""
    titles = "| format | " + " | ".join(formats.DEVICES) + " | read as its writer reads it |"
    lines = [titles, "|---|" + "---|" * (len(formats.DEVICES) + 1)]
    for one in formats.FORMATS.values():
        cells = [_cell(one.cells[device]) for device in formats.DEVICES]
        mark = f"✓ {one.writer}" if one.writer else "~" if one is not _PLAIN else ""
        lines.append(f"| {one.title} | {' | '.join(cells)} | {mark} |")
    cells = [_cell(formats.computed(None, formats.INT8, device)) for device in formats.DEVICES]
    lines.append(f"| any, with `--quantization int8` | {' | '.join(cells)} | |")
    return lines


_PLAIN = formats.FORMATS[formats.PLAIN]


def _cell(found: formats.Computed) -> str:
    return f"{found.name}: {found.size}"


def page(text: str) -> str:
    """The page with its table as of now."""
    before, after = text.index(BEGIN) + len(BEGIN), text.index(END)
    return f"{text[:before]}\n\n{table()}\n\n{text[after:]}"


if __name__ == "__main__":
    new = page(PAGE.read_text())
    if "--check" in sys.argv and new != PAGE.read_text():
        sys.exit("docs/models.md is not as `python -m engine.model.support` writes it")
    PAGE.write_text(new)
