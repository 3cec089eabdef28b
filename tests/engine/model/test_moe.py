"""Mixtures of experts: a row's result does not depend on the rows beside it, only weights of used experts are read, and
both forms of the grouped product agree. Equality with Hugging Face is in test_parity*.py."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from engine.layers import moe
from engine.layers.linear import Linear, PanelLinear
from engine.layers.moe import Experts, GroupedMm, JobsOfEach, LinearOfEach, Mlp, Moe
from engine.model import make_moe, weights
from engine.model.config import ModelConfig
from engine.model.decoder import Decoder
from engine.model.weights import Checkpoint
from engine.ops.cpu.team import KernelTeam
from engine.ops.moe import Routing, Sorted
from engine.parallel.group import NullGroup

COUNT, HIDDEN, INNER, TOKENS = 8, 32, 48, 70


def random(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def gate(x: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return F.silu(first) * second


def by_rows(weight: Tensor) -> Linear:
    """A product whose sums have one order, whatever rows it computes together."""
    return lambda x: (x[:, None] * weight).sum(-1)


TEAM = KernelTeam(2, torch.bfloat16, 16)


def by_panels(weight: Tensor) -> Linear:
    return PanelLinear(weight, None, TEAM)


ROUTINGS = {
    "softmax": Routing(2, "softmax", True, False),
    "rounded": Routing(3, "softmax", False, True),
    "softmax of chosen": Routing(2, "softmax of chosen", False, False),
    "sigmoid": Routing(2, "sigmoid", True, False, random(COUNT, seed=9) / 5, 4, 2, 1.5),
}


def make(routing: Routing, linear, dtype: torch.dtype) -> Moe:
    def draw(*shape: int, seed: int) -> Tensor:
        return random(*shape, seed=seed, dtype=dtype) / 5

    gate_up = [linear(draw(2 * INNER, HIDDEN, seed=one)) for one in range(COUNT)]
    down = [linear(draw(HIDDEN, INNER, seed=100 + one)) for one in range(COUNT)]
    of_each = make_moe._of_each
    experts = Experts(of_each(gate_up, 2 * INNER), of_each(down, HIDDEN), range(COUNT), COUNT)
    shared = Mlp(linear(draw(2 * INNER, HIDDEN, seed=200)), linear(draw(HIDDEN, INNER, seed=201)))
    router = by_rows(random(COUNT, HIDDEN, seed=202, dtype=dtype))
    return Moe(router, routing, experts, shared, linear(draw(1, HIDDEN, seed=203)))


@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize(
    ("linear", "dtype"),
    [(by_rows, torch.float32), (by_panels, torch.bfloat16)],
)
def test_a_row_is_the_same_whatever_rows_are_beside_it(routing, linear, dtype, monkeypatch):
    """To the last bit: alone, among many, in another order, and in pieces of a long prompt."""
    layer, y = make(ROUTINGS[routing], linear, dtype), random(TOKENS, HIDDEN, seed=1, dtype=dtype)
    together = layer(y, gate)
    assert len(together.unique(dim=0)) == TOKENS
    alone = torch.cat([layer(y[row : row + 1], gate) for row in range(TOKENS)])
    order = torch.randperm(TOKENS, generator=torch.Generator().manual_seed(2))
    assert torch.equal(alone, together)
    assert torch.equal(layer(y[order], gate), together[order])
    monkeypatch.setattr(moe, "MAX_PAIRS", 50)
    assert torch.equal(layer(y, gate), together)


def test_equal_gates_choose_the_same_experts_in_any_batch():
    """Logits of bf16 are often equal."""
    routing, logits = ROUTINGS["rounded"], torch.zeros(TOKENS, COUNT, dtype=torch.bfloat16)
    logits[::2, 3] = 1.0
    together = routing.choose(logits)[1]
    alone = [routing.choose(logits[row : row + 1])[1] for row in range(TOKENS)]
    assert torch.equal(torch.cat(alone), together)


@pytest.mark.parametrize("held", [range(COUNT), range(3), range(3, 8), range(5, 6)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_torchs_grouped_product_gives_what_one_for_each_expert_gives(held, dtype):
    """Also where a rank holds some of the experts, and a token has none of them."""
    gates = random(len(held), 2 * INNER, HIDDEN, seed=3, dtype=dtype) / 5
    downs = random(len(held), HIDDEN, INNER, seed=4, dtype=dtype) / 5
    y, logits = random(TOKENS, HIDDEN, seed=5, dtype=dtype), random(TOKENS, COUNT, seed=6)
    weights, chosen = ROUTINGS["softmax"].choose(logits)
    biases = [random(*one.shape[:2], seed=7, dtype=dtype) / 5 for one in (gates, downs)]
    each = [
        LinearOfEach(
            [partial(F.linear, weight=w, bias=b) for w, b in zip(one, bias, strict=True)], one.shape[1]
        )
        for one, bias in zip((gates, downs), biases, strict=True)
    ]
    one = Experts(each[0], each[1], held, COUNT)(y, weights, chosen, gate)
    other = Experts(GroupedMm(gates, biases[0]), GroupedMm(downs, biases[1]), held, COUNT)(
        y, weights, chosen, gate
    )
    close = 1e-5 if dtype is torch.float32 else 3e-2
    torch.testing.assert_close(one, other, atol=close, rtol=close)
    missing = ~((chosen >= held.start) & (chosen < held.stop)).any(-1)
    assert bool(missing.any()) == (len(held) < COUNT) and not other[missing].any()


def test_the_grouped_product_is_tried_with_the_size_of_the_experts(monkeypatch):
    """It refuses rows that are no multiple of 16 bytes, also on this device, which stands for a card here."""
    card = SimpleNamespace(type="cuda")
    here = SimpleNamespace(
        zeros=lambda *size, device, dtype: torch.zeros(*size, dtype=dtype),
        tensor=lambda values, device, dtype: torch.tensor(values, dtype=dtype),
        int32=torch.int32,
        _grouped_mm=torch._grouped_mm,
    )
    monkeypatch.setattr(make_moe, "torch", here)
    assert make_moe.grouped_works.__wrapped__(card, torch.bfloat16, 64, 32)
    assert not make_moe.grouped_works.__wrapped__(card, torch.bfloat16, 64, 33)


def test_single_tokens_read_the_weights_of_their_experts_only():
    used: list[int] = []

    def watched(number: int, weight: Tensor) -> Linear:
        def product(x: Tensor) -> Tensor:
            used.append(number)
            return F.linear(x, weight)

        return product

    gates = [watched(one, random(2 * INNER, HIDDEN, seed=one)) for one in range(COUNT)]
    downs = [watched(one, random(HIDDEN, INNER, seed=one)) for one in range(COUNT)]
    experts = Experts(LinearOfEach(gates, 2 * INNER), LinearOfEach(downs, HIDDEN), range(COUNT), COUNT)
    chosen = torch.tensor([[6, 1], [6, 3]])
    experts(random(2, HIDDEN, seed=1), torch.full((2, 2), 0.5), chosen, gate)
    assert used == [1, 3, 6] * 2


@pytest.mark.parametrize("held", [range(COUNT), range(3, 8), range(5, 6)])
def test_one_list_of_jobs_gives_what_a_call_for_each_expert_gives(held):
    """To the last bit, with biases, and where a rank holds some of the experts."""

    def linears(outputs: int, inputs: int) -> list[PanelLinear]:
        sizes = ((outputs, inputs), (outputs,))
        drawn = [[random(*size, seed=one, dtype=torch.bfloat16) / 5 for size in sizes] for one in held]
        return [PanelLinear(weight, bias, TEAM) for weight, bias in drawn]

    gates, downs = linears(2 * INNER, HIDDEN), linears(HIDDEN, INNER)
    y = random(TOKENS, HIDDEN, seed=5, dtype=torch.bfloat16)
    weights, chosen = ROUTINGS["softmax"].choose(random(TOKENS, COUNT, seed=6))
    made = (make_moe._of_each(gates, 2 * INNER), make_moe._of_each(downs, HIDDEN))
    assert all(isinstance(one, JobsOfEach) for one in made)

    experts = Experts(*made, held, COUNT)
    jobs = experts(y, weights, chosen, gate)
    calls = Experts(LinearOfEach(gates, 2 * INNER), LinearOfEach(downs, HIDDEN), held, COUNT)
    assert jobs.any()
    assert torch.equal(jobs, calls(y, weights, chosen, gate))
    rows = [slice(row, row + 1) for row in range(TOKENS)]
    alone = [experts(y[row], weights[row], chosen[row], gate) for row in rows]
    assert torch.equal(torch.cat(alone), jobs)


def test_pairs_of_others_come_last():
    order = Sorted.of(torch.tensor([[0, 5], [3, 4], [4, 7]]), range(3, 6))
    assert order.groups == [(0, 0, 1), (1, 1, 3), (2, 3, 4)]
    assert order.own_pairs().tolist() == [2, 3, 4, 1]


def test_files_are_opened_once(checkpoint, monkeypatch):
    opened: list[object] = []
    really = weights._open

    def count(file):
        opened.append(file)
        return really(file)

    model = checkpoint("llama")
    read = Checkpoint(model, torch.float32, torch.device("cpu"))
    monkeypatch.setattr(weights, "_open", count)
    with read as files:
        Decoder(ModelConfig.read(model), files, NullGroup(), lambda weight, bias, **_: by_rows(weight))
    assert len(opened) == 1
    assert not read._opened
    tensor = read.get("model.norm.weight", 64)
    assert tensor.untyped_storage().nbytes() == tensor.numel() * tensor.itemsize, "it keeps the mapping"
    read._opened.clear()
