"""Reports of the benchmark equal its measurements; the measurements themselves are not repeated here."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from tokenizers import Tokenizer

from bench import checkpoint, limits, report
from bench.__main__ import SECTIONS, main
from bench.checkpoint import ModelShape
from bench.figures import Figure, Section
from bench.sections import steps

SMALL = ModelShape(layers=2, hidden=64, heads=4, kv_heads=2, head_dim=16, intermediate=96, vocab=1024)
MACHINE: dict[str, Any] = {
    "cpu": "a processor",
    "cores": 2,
    "packages": {"torch": "1"},
    "load_average": 0.1,
    "measured_unix_seconds": 0.0,
}


def test_bounds_are_read_both_ways() -> None:
    assert Figure("a", 0.7, bound="≥ 0.6").met is True
    assert Figure("a", 0.5, bound="≥ 0.6").met is False
    assert Figure("a", 0.5, bound="≤ 0.6").met is True
    assert Figure("a", 0.5).met is None


def test_report_keeps_sections_that_were_not_measured_again(tmp_path: Path) -> None:
    first, second = (Section(name, name.title(), [Figure("speed", 3.0, "m/s")]) for name in ("one", "two"))
    report.write(tmp_path, MACHINE, [first], "bench one")
    report.write(tmp_path, MACHINE, [second], "bench two")
    found = json.loads((tmp_path / "report.json").read_text())
    assert {name: section["command"] for name, section in found["sections"].items()} == {
        "one": "bench one",
        "two": "bench two",
    }
    shown = (tmp_path / "report.md").read_text()
    assert shown.count("| speed | 3 m/s |") == 2
    assert (
        shown.index("bench one") < shown.index("### One") < shown.index("bench two") < shown.index("### Two")
    )


def test_shortfalls_are_reported() -> None:
    shown = report.markdown(
        MACHINE, [Section("s", "S", [Figure("f", 1.0, bound="≥ 2", note="why")])], "bench"
    )
    assert "**not met** · why" in shown


@pytest.mark.parametrize(
    ("value", "shown"),
    [(0.0, "0"), (0.00042, "0.00042"), (0.71234, "0.712"), (12.345, "12.3"), (12345.6, "12,346")],
)
def test_a_number_has_three_digits_and_thousands_are_separated(value: float, shown: str) -> None:
    assert report.number(value) == shown


def test_checkpoint_is_whole_and_written_once(tmp_path: Path) -> None:
    directory = checkpoint.write(tmp_path / "model", SMALL)
    config = json.loads((directory / "config.json").read_text())
    with safe_open(str(directory / "model.safetensors"), "pt") as file:
        names = set(file.keys())
        assert file.get_tensor("model.layers.1.mlp.down_proj.weight").shape == (64, 96)
        assert file.get_tensor("lm_head.weight").dtype == torch.bfloat16
    assert len(names) == 3 + SMALL.layers * 9
    assert config["num_key_value_heads"] == 2
    before = (directory / "model.safetensors").stat().st_mtime_ns
    checkpoint.write(tmp_path / "model", SMALL)
    assert (directory / "model.safetensors").stat().st_mtime_ns == before


def test_tokenizer_fills_the_vocabulary_and_gives_text_back(tmp_path: Path) -> None:
    directory = checkpoint.write(tmp_path / "model", SMALL)
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    assert tokenizer.get_vocab_size() == SMALL.vocab
    text = "Die größte Straße – 42 €\n\tdef f(x):"
    assert tokenizer.decode(tokenizer.encode(text).ids) == text
    assert tokenizer.token_to_id(checkpoint.EOS) == SMALL.vocab - 1


def test_the_real_shape_is_the_one_that_is_quoted() -> None:
    weights = checkpoint.SHAPE.linear_weights + 2 * checkpoint.SHAPE.vocab * checkpoint.SHAPE.hidden
    assert weights == pytest.approx(205.6e6, rel=0.01)
    assert checkpoint.SHAPE.kv_bytes_per_token == 32768


def test_every_way_of_a_linear_multiplies_alike() -> None:
    """And the engine's own product is one of them where the engine uses it: its fraction is held against the best."""
    weight, x = torch.randn(48, 32).to(torch.bfloat16), torch.randn(5, 32).to(torch.bfloat16)
    plain, *others = (way() for way in limits._linear_ways(x, weight))
    prepacked = limits.prepack(weight, 5) is not None
    assert len(others) == prepacked + 2
    for product in others:
        torch.testing.assert_close(product.to(plain.dtype), plain, rtol=2e-2, atol=2e-2)


def test_a_plan_is_timed_until_another_process_has_it() -> None:
    found = steps.section(sequences=5, tokens=64, steps=4)
    scheduling, telling = (figure.value for figure in found.figures)
    assert 0 < scheduling < 1000 and 0 < telling < 1000


def test_unknown_sections_are_refused() -> None:
    with pytest.raises(SystemExit):
        main(["--only", "nonsense"])


def test_every_section_can_be_imported() -> None:
    from importlib import import_module

    for name in SECTIONS:
        assert callable(import_module(f"bench.sections.{name}").run)
