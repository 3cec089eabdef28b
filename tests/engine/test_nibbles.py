"""Products with 4-bit weights on a CPU: near the exact ones, bitwise the same whatever rows are beside, within their
memory; and engines that keep such weights as they are stored."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from cluster.config.worker import EngineConfig
from engine import build
from engine.build import load_model
from engine.layers.linear import NibbleLinear, PanelLinear
from engine.model.config import ModelConfig
from engine.ops import cpu_nibbles, cpu_products, cpu_tiles
from engine.ops.codes import NIBBLES, CodedWeight
from engine.ops.team import KernelTeam
from engine.plan import PlanItem, StepPlan
from engine.runner import ModelRunner
from tests.engine.guarded_memory import guarded

needs_instruction = pytest.mark.skipif(
    not cpu_products.has_instruction(), reason="this CPU has no AVX512-BF16"
)
GOLDEN = Path(__file__).parent / "golden" / "formats"
IDS = [3, 17, 29, 4, 26, 23, 8, 11, 2, 7]


def coded(group: int, outputs: int, inputs: int, *, symmetric: bool = False) -> CodedWeight:
    draw = torch.Generator().manual_seed(group + outputs)
    codes = torch.randint(0, 256, (outputs, inputs // 2), dtype=torch.uint8, generator=draw)
    groups = -(-inputs // group) if group else 1
    scales = torch.rand(outputs, groups, generator=draw) + 0.5
    zeros = torch.randint(0, 17, scales.shape, dtype=torch.uint8, generator=draw)
    return CodedWeight(NIBBLES, codes, scales, zeros.fill_(8) if symmetric else zeros, group)


def layer(weight: CodedWeight, bias: torch.Tensor | None = None, threads: int = 1) -> NibbleLinear:
    return NibbleLinear(weight, bias, KernelTeam(threads, torch.bfloat16, 64))


def rows_of(count: int, inputs: int) -> torch.Tensor:
    return torch.randn(count, inputs, generator=torch.Generator().manual_seed(1)).bfloat16()


@needs_instruction
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("group", [0, 32, 96, 128])
@pytest.mark.parametrize("shape", [(37, 320), (5, 96), (64, 2048)])
def test_products_are_those_of_the_exact_weights(shape, group, symmetric):
    """For one row, for tiles, and for so many that groups are unpacked first; the last group may have fewer inputs. 2,048
    inputs of one group are too many to unpack."""
    outputs, inputs = shape
    weight, bias = coded(group, outputs, inputs, symmetric=symmetric), torch.randn(outputs).bfloat16()
    made, x = layer(weight, bias), rows_of(150, inputs)
    assert bool(made.row_bytes) == (not symmetric)
    exact = x.double() @ weight.expanded(torch.float32).double().T + bias.double()
    alone = torch.cat([made(x[row : row + 1]) for row in range(20)])
    torch.testing.assert_close(alone.double(), exact[:20], rtol=4e-3, atol=2e-5 * float(exact.abs().max()))
    for rows in (0, 2, 5, 6, 7, 12, 13, 20, 150):
        assert torch.equal(made(x[:rows])[:20], alone[:rows]), rows
    assert torch.equal(made(x[9:60])[:11], alone[9:])


@needs_instruction
@pytest.mark.parametrize("group", [0, 32, 128])
def test_sums_are_added_in_one_order(group):
    """A bias that takes the result away leaves what float32 sums have rounded, which depends on their order."""
    weight, x = coded(group, 64, 512), rows_of(20, 512)
    exact = x[0].double() @ weight.expanded(torch.float32).double().T
    made = layer(weight, -exact.float())
    alone = made(x[:1])
    assert int((alone != 0).sum()) > 40
    for rows in (2, 6, 7, 20):
        assert torch.equal(made(x[:rows])[:1], alone), rows


@needs_instruction
@pytest.mark.parametrize("threads", [2, 3])
def test_shares_of_threads_give_the_same_bits(threads):
    weight, x = coded(64, 150, 256), rows_of(40, 256)
    expected = layer(weight)(x)
    assert torch.equal(layer(weight, threads=threads)(x), expected)
    assert torch.equal(layer(weight, threads=threads)(x[:3]), expected[:3])


@needs_instruction
@pytest.mark.parametrize("rows", [1, 3, 6, 7, 50])
def test_nothing_is_read_or_written_beyond_the_rows(rows):
    """A product that does ends the process."""
    made = layer(coded(32, 75, 64))
    x, _x_memory = guarded((rows, 64), True)
    out, _out_memory = guarded((rows, 75), False)
    sums, _sums_memory = guarded((rows, made.row_bytes // 2), False)
    for job in made.jobs(rows, x.data_ptr(), out.data_ptr(), sums.data_ptr(), 0):
        made._team.run(*job)
    assert torch.equal(out, made(x.clone()))


@needs_instruction
def test_a_matrix_of_many_panels_is_packed_a_part_at_a_time():
    """And takes what `panel_bytes` says."""
    outputs, inputs = 32 * 70 + 3, 64
    weight = coded(32, outputs, inputs)
    panels, offsets = cpu_nibbles.pack(weight)
    assert offsets and panels.nbytes == cpu_nibbles.panel_bytes(outputs, inputs, 32, offsets=True)
    x = rows_of(2, inputs)
    exact = x.double() @ weight.expanded(torch.float32).double().T
    torch.testing.assert_close(layer(weight)(x).double(), exact, rtol=4e-3, atol=1e-3)


# --- engines ----------------------------------------------------------------------------------------------


def config_of(name: str, **changes: object) -> EngineConfig:
    given = {"model": GOLDEN / name, "kv_memory_bytes": 4 << 20, "max_model_len": 64, "device": "cpu"}
    return EngineConfig(**{**given, **changes})


@needs_instruction
@pytest.mark.parametrize("name", ["awq", "w4a16", "w4a16-asymmetric"])
def test_an_engine_keeps_the_codes_and_gives_their_logits(name, monkeypatch):
    """Of a prompt, and of single tokens by a list of jobs, which equals operations one by one."""
    monkeypatch.setattr(cpu_tiles, "supported", lambda *kind: False)
    found = []
    for dtype, backend in (("bfloat16", "cpu"), ("float32", "sdpa")):
        loaded = load_model(config_of(name, dtype=dtype, attention_backend=backend))
        layers = loaded.decoder.layers
        products = [one for x in layers for one in (x.qkv, x.output, *vars(x.mlp).values())]
        assert {type(one) for one in products} & {NibbleLinear} == (
            {NibbleLinear} if backend == "cpu" else set()
        )
        runner = ModelRunner(loaded)
        prompt = runner.execute(StepPlan([PlanItem("r", IDS[:9], 0, [1], 0, 1)], []))
        token = runner.execute(StepPlan([PlanItem("r", IDS[9:], 9, [1], 0, 1)], []))
        if backend == "cpu":
            assert runner.listed_steps == 1
            whole = runner.execute(StepPlan([PlanItem("s", IDS, 0, [2], 1, 1)], []))
            torch.testing.assert_close(whole, token, rtol=0, atol=2e-2 * float(token.abs().max()))
        found.append(torch.cat([prompt, token]).float())
    assert float((found[0] - found[1]).abs().mean() / found[1].abs().mean()) < 0.05


@pytest.mark.parametrize("amx", [True, False])
def test_codes_are_kept_where_no_amx_computes_expanded_weights(amx, monkeypatch):
    monkeypatch.setattr(cpu_nibbles, "has_instruction", lambda: True)
    monkeypatch.setattr(cpu_tiles, "supported", lambda *kind: amx)
    model = ModelConfig.read(GOLDEN / "awq")
    config = config_of("awq", dtype="bfloat16", attention_backend="cpu")
    kept, expanded = (
        build.weight_bytes(model, config.model_copy(update=changes))
        for changes in ({}, {"attention_backend": "sdpa"})
    )
    assert (kept == expanded) == amx
    for changes in ({"dtype": "float32"}, {"quantization": "int8"}):
        assert build._kept_codes(config.model_copy(update=changes)) is None


@needs_instruction
def test_other_codes_are_expanded(monkeypatch):
    """The kernels read four bits alone."""
    monkeypatch.setattr(cpu_tiles, "supported", lambda *kind: False)
    eight_bits = [path.name for path in GOLDEN.iterdir() if path.name.startswith(("w8a16", "fp8"))]
    assert eight_bits
    for name in eight_bits:
        loaded = load_model(config_of(name, dtype="bfloat16", attention_backend="cpu"))
        assert all(isinstance(one.output, PanelLinear) for one in loaded.decoder.layers), name
