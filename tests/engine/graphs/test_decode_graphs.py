"""Recorded decode steps give what the same operations give one by one; padding changes nothing and reads nothing."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from cluster.config.worker import EngineConfig
from engine.attention.base import AttentionShape
from engine.attention.varlen import VarlenBackend
from engine.build import load_model
from engine.graphs.decode_graphs import SIZES, DecodeGraphs, on_card, sizes_for
from engine.ops.torch_ops import TorchOps
from engine.plan import BlockCopy, PlanItem, StepPlan
from engine.request import EngineRequest, SamplingParams
from engine.runner import ModelRunner
from engine.step_buffers import Padding, StepBuffers
from engine.step_delta import StepDelta
from tests.engine.decode_steps import PAGE, filled, tokens_after
from tests.engine.ranks import engine_of, run
from tests.harness.checkpoints import EXPERTS, prompt_ids, variants
from tests.harness.replayed import Captured, HostRead, ReplayRecorder, paged_tokens


class Mixed:
    """Attention of steps with prompts by one backend, of single tokens by the other, which can be captured."""

    name, capturable = "mixed", True

    def __init__(self, prompts: Any, tokens: Any):
        self._of = (prompts, tokens)
        self._now = tokens

    def begin(self, step: StepBuffers) -> None:
        self._now = self._of[step.most_tokens == 1]
        if step.most_tokens == 1:
            step.bound_lengths()  # plain steps too: their sums are then over as many keys
        self._now.begin(step)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        mixed: Tensor = self._now.attend(layer, q, k, v)
        return mixed


def make(model: Any, recorder: ReplayRecorder | None, *, batch: int = 20) -> ModelRunner:
    config = EngineConfig(
        model=model,
        dtype="float32",
        kv_memory_bytes=8 << 20,
        max_model_len=256,
        attention_backend="sdpa",
        max_batch_requests=batch,
    )
    loaded = load_model(config)
    c, d = loaded.model_config, loaded.decoder
    shape = AttentionShape(d.num_heads, d.num_kv_heads, c.head_dim, PAGE, c.windows)
    assert isinstance(loaded.ops, TorchOps)
    whole = loaded.ops._cache
    assert whole.shape[0] == len(loaded.kv_cache) + 1
    tokens = VarlenBackend(shape, whole, paged_tokens)
    return ModelRunner(replace(loaded, attention=Mixed(loaded.attention, tokens)), None, recorder)


def with_null_block(runner: ModelRunner) -> Tensor:
    assert isinstance(runner._ops, TorchOps)
    return runner._ops._cache


@pytest.fixture
def row_by_row(monkeypatch):
    """Products that do not depend on the number of rows, so that a padded step can be compared to the last bit."""
    monkeypatch.setattr(F, "linear", lambda x, w, b=None: _product(x, w) if b is None else _product(x, w) + b)


def _product(x: Tensor, weight: Tensor) -> Tensor:
    return (x[..., None, :] * weight).sum(-1)


@pytest.mark.parametrize("variant", variants(without=EXPERTS))
def test_logits_are_those_of_the_plain_step_to_the_last_bit(variant, checkpoint, row_by_row):
    """All but the sequences' own keys and values is NaN, the null block too."""
    recorder = ReplayRecorder()
    plain, recorded = make(checkpoint(variant), None), make(checkpoint(variant), recorder)
    for lengths in ([40], [0, 5, 16, 31, 32, 100, 7], [3] * 20, [40, 63, 2], [17], [50, 9, 0, 1, 30]):
        items = tokens_after(lengths)
        filled(plain, items, 0.0)
        expected = plain.execute(StepPlan(items, []))
        written = plain.kv_cache.clone()
        for _ in range(2):
            filled(recorded, items, math.nan)
            with_null_block(recorded)[-1].fill_(math.nan)
            got = recorded.execute(StepPlan(items, []))
            assert expected.isfinite().all() and torch.equal(got, expected)
            own = recorded.kv_cache
            assert torch.equal(own.isfinite() & (own != 0), written != 0)
    assert len(recorder.tapes) == 4  # 1, 8, 24 and 4 sequences


def test_padding_is_written_to_the_null_block_only(checkpoint):
    recorder = ReplayRecorder()
    runner = make(checkpoint("llama"), recorder)
    whole = with_null_block(runner)
    items = tokens_after([20, 5, 33])
    for _ in range(2):
        whole.fill_(math.nan)
        runner.execute(StepPlan(items, []))
        written = whole.isfinite().flatten(1).any(1).nonzero().flatten().tolist()
        assert written == sorted({item.block_ids[item.begin // PAGE] for item in items} | {runner.num_blocks})
    step = runner._buffers
    assert (step.num_items, step.num_tokens, step.num_logits) == (4, 4, 4)
    assert step.slots.tolist()[3] // PAGE == runner.num_blocks
    assert step.table[step.rows[3]].unique().tolist() == [runner.num_blocks]


def test_every_size_has_the_next_larger_one():
    assert sizes_for(256) == SIZES and SIZES[:6] == (1, 2, 4, 8, 16, 24) and SIZES[-1] == 256
    assert sizes_for(1) == (1,) and sizes_for(3) == (1, 2, 4) and sizes_for(9)[-1] == 16
    assert sizes_for(1000) == SIZES


def test_the_warm_up_records_every_size(checkpoint):
    """Also those above the number of rows that the tables have."""
    recorder = ReplayRecorder()
    runner = make(checkpoint("llama"), recorder)
    runner.warm_up()
    assert len(recorder.tapes) == len(sizes_for(20)) == 6
    for count in range(1, 21):
        runner.execute(StepPlan(tokens_after([3] * count), []))
    assert len(recorder.tapes) == 6


def test_other_steps_are_computed_one_by_one(checkpoint):
    """Prompts, chunks of one token, exports, and more sequences than the largest size."""
    recorder = ReplayRecorder()
    runner = make(checkpoint("llama"), recorder, batch=2)
    token, other, third = tokens_after([20, 20, 20])
    for items in (
        [token, PlanItem("prompt", [1, 2], 0, other.block_ids, 1, 1)],
        [token, PlanItem("chunk", [1], 4, other.block_ids, 1, 0)],
        [PlanItem("sent", [1], 4, token.block_ids, 1, 1, export=True)],
        [token, other, third],
    ):
        runner.execute(StepPlan(items, []))
    assert not recorder.tapes
    runner.execute(StepPlan([token, other], []))
    assert len(recorder.tapes) == 1


def test_steps_of_several_tokens_each():
    """The rows of a verified draft: padding has as many."""
    step = StepBuffers(4, 8, 32, 4, torch.device("cpu"), padding=Padding(4, 12, 77))
    seen = []

    def forward() -> Tensor:
        seen.append(step.longest)
        return (step.tokens * 100 + step.positions)[:, None].float()

    graphs = DecodeGraphs(forward, step, ReplayRecorder(), (1, 2, 4), torch.zeros(12, 1), tokens_each=3)
    drafts = [
        PlanItem(str(row), [row + 1, 8, 9], 5 + row, [2 * row, 2 * row + 1, 20 + row], row, 3)
        for row in range(3)
    ]
    delta = StepDelta.of(StepPlan(drafts, []))
    assert graphs.takes(delta)
    assert graphs.run(delta)[:, 0].tolist() == [105, 806, 907, 206, 807, 908, 307, 808, 909]
    assert step.cu_q.tolist() == [0, 3, 6, 9, 12] and step.ends.tolist() == [8, 9, 10, 3]
    assert step.slots.tolist()[9:] == [4 * 77, 4 * 77 + 1, 4 * 77 + 2]
    assert set(seen) == {32}, "a recording is for every length"
    one = StepDelta.of(StepPlan([PlanItem("one", [1], 0, [0], 0, 1)], []))
    assert not graphs.takes(one)


def test_the_captured_part_reads_nothing_back(checkpoint):
    recorder = ReplayRecorder()
    runner = make(checkpoint("llama"), recorder)
    runner.warm_up()
    launches = [sum(tape.launches.values()) for tape in recorder.tapes]
    assert len(set(launches)) == 1, "as many for any number of sequences"
    assert launches[0] <= 80 * runner.model_config.num_layers


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x.sum().item(),
        lambda x: x.nonzero(),
        lambda x: x[x > 1],
        lambda x: bool((x > 1).any()),
        lambda x: x.tolist(),
        lambda x: torch.tensor([1, 2]) + 1,
        lambda x: x.to("meta"),
        lambda x: x.masked_select(x > 1),
    ],
)
def test_host_reads_are_found(function):
    with pytest.raises(HostRead), Captured():
        function(torch.ones(3))


def test_an_engine_says_the_same_with_and_without_recordings(checkpoint):
    """Requests come and go and fork, so that most steps are padded."""
    answers = []
    for recorder in (None, ReplayRecorder()):
        runner = make(checkpoint("llama"), recorder)
        requests = [
            EngineRequest(
                str(i),
                prompt_ids(9 + 8 * i, seed=i),
                SamplingParams(temperature=0.0, max_tokens=6 + 5 * i, ignore_eos=True),
                n=1 + i % 2,
            )
            for i in range(5)
        ]
        answers.append(run(engine_of(runner), *requests).tokens)
    assert answers[0] == answers[1]


def test_recordings_need_a_card_and_a_backend_that_can_be_captured(caplog):
    cuda = torch.device("cuda")
    assert on_card(torch.device("cpu"), True, True) is None
    assert on_card(cuda, False, True) is None
    with caplog.at_level("INFO"):
        assert on_card(cuda, True, False) is None
    assert "reads lengths on the host" in caplog.text


def test_a_copy_is_made_before_a_recorded_step(checkpoint):
    recorder = ReplayRecorder()
    plain, recorded = make(checkpoint("llama"), None), make(checkpoint("llama"), recorder)
    (item,) = tokens_after([20])
    logits = []
    for runner in (plain, recorded):
        filled(runner, [item], 0.0)
        spare = next(b for b in range(runner.num_blocks) if b not in item.block_ids)
        moved = replace_block(item, spare)
        logits.append(runner.execute(StepPlan([moved], [BlockCopy(item.block_ids[1], spare)])))
    assert torch.equal(*logits)


def replace_block(item: PlanItem, block: int) -> PlanItem:
    return PlanItem(item.request_id, item.token_ids, item.begin, [item.block_ids[0], block], item.row, 1)
