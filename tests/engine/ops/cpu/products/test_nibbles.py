"""Products with 4-bit weights on a CPU, by AMX and by AVX512-BF16: near the exact ones, bitwise the same whatever rows are
beside, within their memory; and engines that keep such weights as they are stored."""

from __future__ import annotations

from operator import itemgetter
from pathlib import Path

import pytest
import torch

from cluster.config.worker import EngineConfig
from engine import build
from engine.build import load_model
from engine.layers.linear import NibbleLinear, PanelLinear
from engine.model.config import ModelConfig
from engine.ops.codes import NIBBLES, CodedWeight
from engine.ops.cpu import jobs
from engine.ops.cpu.codegen import tile_registers
from engine.ops.cpu.products import bf16, nibble_tiles, nibbles
from engine.ops.cpu.team import KernelTeam
from engine.plan import PlanItem, StepPlan
from engine.runner import ModelRunner
from tests.engine.ops.cpu.products.guarded_memory import guarded

needs_instruction = pytest.mark.skipif(not bf16.has_instruction(), reason="this CPU has no AVX512-BF16")
GOLDEN = Path(__file__).parents[3] / "golden" / "formats"
IDS = [3, 17, 29, 4, 26, 23, 8, 11, 2, 7]


@pytest.fixture(params=["amx", "vector"])
def instruction(request, monkeypatch) -> None:
    """By which products are computed. CPUs with AMX have the other one too."""
    if request.param == "vector":
        monkeypatch.setattr(tile_registers, "supported", lambda *kind: False)
    elif not tile_registers.supported():
        pytest.skip("this CPU has no AMX")
    code = jobs.MULTIPLY_NIBBLE_TILES if request.param == "amx" else jobs.MULTIPLY_NIBBLES
    assert layer(coded(32, 5, 32))._multiply == code


by_both = pytest.mark.usefixtures("instruction")


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
@by_both
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("group", [0, 32, 96, 128, 288])
@pytest.mark.parametrize("shape", [(37, 320), (5, 96), (64, 2048)])
def test_products_are_those_of_the_exact_weights(shape, group, symmetric):
    """For one row, for tiles, and for so many that groups are unpacked first, or that rows are packed in blocks; the last
    group may have fewer inputs. 2,048 inputs of one group are too many to unpack, and AMX cuts 288 into slices."""
    outputs, inputs = shape
    weight, bias = coded(group, outputs, inputs, symmetric=symmetric), torch.randn(outputs).bfloat16()
    made, x = layer(weight, bias), rows_of(300, inputs)
    assert bool(made.row_bytes) == (not symmetric)
    exact = x.double() @ weight.expanded(torch.float32).double().T + bias.double()
    alone = torch.cat([made(x[row : row + 1]) for row in range(40)])
    torch.testing.assert_close(alone.double(), exact[:40], rtol=4e-3, atol=2e-5 * float(exact.abs().max()))
    for rows in (0, 2, 5, 6, 7, 12, 13, 16, 17, 20, 31, 32, 33, 65, 300):
        assert torch.equal(made(x[:rows])[:40], alone[:rows]), rows
    assert torch.equal(made(x[9:60])[:31], alone[9:])


@needs_instruction
@by_both
@pytest.mark.parametrize("group", [0, 32, 64, 128])
def test_products_of_small_integers_are_those_of_plain_arithmetic(group):
    """All sums are exact, so the order of additions does not matter, and results are equal to the last bit."""
    weight, x = of_integers(group)
    assert weight.zeros is not None
    codes, zeros, scales = _codes(weight), weight.zeros.tolist(), weight.scales.tolist()
    size = group or 256
    expected = [
        [
            sum(
                (code - zeros[o][i // size]) * scales[o][i // size] * row[i]
                for i, code in enumerate(codes[o])
            )
            for o in range(70)
        ]
        for row in x[:3].tolist()
    ]
    made = layer(weight)(x)
    assert torch.equal(made[:3], torch.tensor(expected, dtype=torch.float64).bfloat16())
    assert torch.equal(made, (x.double() @ weight.expanded(torch.float32).double().T).bfloat16())


@needs_instruction
@by_both
def test_shares_of_ranks_give_the_numbers_of_the_whole():
    """Of the outputs, where panels end elsewhere; and of the inputs, in whole groups."""
    weight, x = of_integers(64)
    assert weight.zeros is not None
    whole = layer(weight)(x)
    shares = [weight.each(itemgetter(part)) for part in (slice(33), slice(33, 70))]
    assert torch.equal(torch.cat([layer(one)(x) for one in shares], 1), whole)
    exact = torch.zeros(50, 70, dtype=torch.float64)
    for rank in (0, 1):
        groups, inputs = slice(2 * rank, 2 * rank + 2), slice(128 * rank, 128 * rank + 128)
        codes = weight.codes[:, 64 * rank : 64 * rank + 64].contiguous()
        scales, zeros = (one[:, groups].contiguous() for one in (weight.scales, weight.zeros))
        share, own = CodedWeight(NIBBLES, codes, scales, zeros, 64), x[:, inputs].contiguous()
        added = own.double() @ share.expanded(torch.float32).double().T
        assert torch.equal(layer(share)(own), added.bfloat16())
        exact += added
    assert torch.equal(exact.bfloat16(), whole)


def of_integers(group: int) -> tuple[CodedWeight, torch.Tensor]:
    """70 outputs of 256 inputs, with scales that are powers of 2, and 50 rows of integers."""
    weight, draw = coded(group, 70, 256), torch.Generator().manual_seed(3)
    weight.scales.copy_(2.0 ** torch.randint(-2, 2, weight.scales.shape, generator=draw))
    return weight, torch.randint(-8, 9, (50, 256), generator=draw).bfloat16()


def _codes(weight: CodedWeight) -> list[list[int]]:
    """Of each input in turn: byte i of 16 has input i in its low bits, and input 16 + i in its high bits."""
    found = []
    for row in weight.codes.tolist():
        spans = [row[at : at + 16] for at in range(0, len(row), 16)]
        found.append([one for span in spans for one in [*(b & 15 for b in span), *(b >> 4 for b in span)]])
    return found


@needs_instruction
@by_both
@pytest.mark.parametrize("group", [0, 32, 128])
def test_sums_are_added_in_one_order(group):
    """A bias that takes the result away leaves what float32 sums have rounded, which depends on their order."""
    weight, x = coded(group, 64, 512), rows_of(70, 512)
    exact = x[0].double() @ weight.expanded(torch.float32).double().T
    made = layer(weight, -exact.float())
    alone = made(x[:1])
    assert int((alone != 0).sum()) > 40
    for rows in (2, 6, 7, 16, 17, 20, 33, 70):
        assert torch.equal(made(x[:rows])[:1], alone), rows


@needs_instruction
@by_both
@pytest.mark.parametrize("threads", [2, 3])
def test_shares_of_threads_give_the_same_bits(threads):
    weight, x = coded(64, 150, 256), rows_of(200, 256)
    expected = layer(weight)(x)
    assert torch.equal(layer(weight, threads=threads)(x), expected)
    assert torch.equal(layer(weight, threads=threads)(x[:3]), expected[:3])


@needs_instruction
@by_both
@pytest.mark.parametrize("rows", [1, 3, 6, 7, 16, 20, 32, 33, 50])
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
    panels, offsets = nibbles.pack(weight)
    assert offsets and panels.nbytes == nibbles.panel_bytes(outputs, inputs, 32, offsets=True)
    x = rows_of(2, inputs)
    exact = x.double() @ weight.expanded(torch.float32).double().T
    torch.testing.assert_close(layer(weight)(x).double(), exact, rtol=4e-3, atol=1e-3)


# --- engines ----------------------------------------------------------------------------------------------


def config_of(name: str, **changes: object) -> EngineConfig:
    given = {"model": GOLDEN / name, "kv_memory_bytes": 4 << 20, "max_model_len": 64, "device": "cpu"}
    return EngineConfig(**{**given, **changes})


@needs_instruction
@by_both
@pytest.mark.parametrize("name", ["awq", "w4a16", "w4a16-asymmetric"])
def test_an_engine_keeps_the_codes_and_gives_their_logits(name):
    """Of a prompt, and of single tokens by a list of jobs, which equals operations one by one."""
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


@pytest.mark.parametrize("instruction_", [True, False])
@pytest.mark.parametrize("amx", [True, False])
def test_codes_are_kept_where_an_instruction_multiplies_them(amx, instruction_, monkeypatch):
    """AMX or not."""
    monkeypatch.setattr(nibbles, "has_instruction", lambda: instruction_)
    monkeypatch.setattr(tile_registers, "supported", lambda *kind: amx)
    model = ModelConfig.read(GOLDEN / "awq")
    config = config_of("awq", dtype="bfloat16", attention_backend="cpu")
    kept, expanded = (
        build.weight_bytes(model, config.model_copy(update=changes))
        for changes in ({}, {"attention_backend": "sdpa"})
    )
    assert (kept < expanded) == instruction_
    for changes in ({"dtype": "float32"}, {"quantization": "int8"}):
        assert build._kept_codes(config.model_copy(update=changes)) is None


def test_blocks_of_rows_are_few_tiles_and_one_at_least():
    assert [nibble_tiles.blocks(rows, 2048) for rows in (1, 32, 128, 129, 512)] == [1, 1, 1, 2, 4]
    assert [nibble_tiles.blocks(rows, 16384) for rows in (0, 1, 32, 33, 2048)] == [1, 1, 1, 2, 64]


@needs_instruction
@by_both
def test_other_codes_are_expanded():
    """The kernels read four bits alone."""
    eight_bits = [path.name for path in GOLDEN.iterdir() if path.name.startswith(("w8a16", "fp8"))]
    assert eight_bits
    for name in eight_bits:
        loaded = load_model(config_of(name, dtype="bfloat16", attention_backend="cpu"))
        assert all(isinstance(one.output, PanelLinear) for one in loaded.decoder.layers), name
