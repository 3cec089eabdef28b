"""A decode step as one list of jobs gives the logits of the operations one by one, to the last bit."""

from __future__ import annotations

import gc
import math
import weakref
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

import pytest
import torch
from torch import Tensor

from cluster.config.worker import EngineConfig
from cluster.process import huge_pages
from engine import decode_jobs
from engine.build import load_model
from engine.ops.cpu.jobs import ADD_NORM, AHEAD, AHEAD_BYTES, GATE, KERNEL, LEFT, MULTIPLY, READS
from engine.ops.cpu.products import bf16
from engine.ops.cpu.team import KernelTeam
from engine.plan import ExportSink, PlanItem, StepPlan
from engine.request import EngineRequest, SamplingParams
from engine.runner import ModelRunner
from tests.engine.decode_steps import (
    BLOCKS,
    NO_LIST,
    filled,
    one_by_one,
    tokens_after,
)
from tests.engine.ranks import engine_of, run
from tests.gpu.models import write
from tests.harness.checkpoints import FIRST, prompt_ids, variants


def make(model: Any, threads: int, sink: ExportSink | None = None, dtype: str = "bfloat16") -> ModelRunner:
    config = EngineConfig(
        model=model, dtype=dtype, kv_memory_bytes=8 << 20, max_model_len=256, threads=threads
    )
    runner = ModelRunner(load_model(config), sink)
    assert runner.num_blocks >= BLOCKS
    return runner


@torch.inference_mode()
def poison(runner: ModelRunner) -> None:
    assert runner._decode_jobs is not None, "the list is what is tested"
    for buffer in vars(runner._decode_jobs._work).values():
        buffer.fill_(math.nan)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("variant", variants((*FIRST, "gemma3"), NO_LIST))
def test_logits_are_the_same_to_the_last_bit(variant, threads, checkpoint):
    same_in_lists(make(checkpoint(variant), threads))


@pytest.mark.parametrize(("variant", "threads"), [("llama", 1), ("llama-mqa-tied", 2)])
def test_logits_in_fp32_are_the_same_to_the_last_bit(variant, threads, checkpoint):
    same_in_lists(make(checkpoint(variant), threads, dtype="float32"))


def same_in_lists(runner: ModelRunner) -> None:
    assert runner._decode_jobs is not None
    held = []  # a list over earlier buffers gives wrong logits then, and does not crash the process
    # One row again at last: buffers have grown since the list for it was made.
    for lengths in ([40], [0, 5, 16, 31, 32, 100, 7], [3] * 20, [40, 63], [40]):
        items = tokens_after(lengths)
        plan = StepPlan(items, [])
        filled(runner, items, 0.0)
        expected = one_by_one(runner, plan)
        written = runner.kv_cache.clone()
        assert expected.isfinite().all() and expected.shape[0] == len(items)
        for stale in (0.0, math.nan):
            for _ in range(2):  # a list that was made before, over what the last step left
                filled(runner, items, stale)
                poison(runner)
                logits = runner.execute(plan)
                poison(runner)
                assert torch.equal(logits, expected), "they are not the buffer of the next step"
                held.append(runner._decode_jobs._work)
            own = runner.kv_cache[:BLOCKS]
            assert torch.equal(own.isfinite() & (own != 0), written[:BLOCKS] != 0)


def test_buffers_of_a_large_batch_are_trimmed(checkpoint, monkeypatch):
    """After so many steps in a row that need a quarter of them; the steps' logits are the same."""
    monkeypatch.setattr(decode_jobs, "TRIM_AFTER", 3)
    runner = make(checkpoint("llama"), 2)
    jobs = runner._decode_jobs
    assert jobs is not None
    sizes = []
    for rows in (20, 3, 8, 8, 9, 8, 8, 8, 8, 3, 3, 3, 1, 1, 1, 1, 20):
        items = tokens_after([5] * rows)
        filled(runner, items, math.nan)
        expected = one_by_one(runner, StepPlan(items, []))
        assert torch.equal(runner.execute(StepPlan(items, [])), expected)
        sizes.append(len(jobs._work.x))
    assert sizes == [32] * 8 + [8] * 4 + [8] * 3 + [2, 32]


def test_other_steps_are_computed_one_by_one(checkpoint, tmp_path):
    """Prompts, chunks of one token; and all of a model that has operations without a kernel."""
    runner = make(checkpoint("llama"), 1)
    jobs = runner._decode_jobs
    assert jobs is not None
    token, other = tokens_after([20, 20])
    for items, taken in (
        ([token, other], True),
        ([token, PlanItem("prompt", [1, 2], 0, other.block_ids, 1, 1)], False),
        ([token, PlanItem("chunk", [1], 4, other.block_ids, 1, 0)], False),
    ):
        runner.execute(StepPlan(items, []))
        assert jobs.takes(runner._buffers) is taken
    assert make(write(tmp_path, "olmo2"), 1)._decode_jobs is None


def test_a_chunk_of_one_token_is_exported_layer_by_layer(checkpoint):
    told = []

    class Sink:
        def layer_computed(
            self, request_id: str, layer: int, token_begin: int, token_end: int, block_ids: Sequence[int]
        ) -> None:
            told.append((request_id, layer, token_begin, token_end, list(block_ids)))

    runner = make(checkpoint("llama"), 1, Sink())
    runner.execute(StepPlan([PlanItem("r", [1], 20, [5, 9, 7], 0, 1, export=True)], []))
    layers = range(runner.model_config.num_layers)
    assert told == [("r", layer, 20, 21, [5, 9]) for layer in layers]


@pytest.mark.parametrize("threads", [1, 2])
def test_an_engine_says_the_same_with_and_without_lists(threads, checkpoint):
    """Requests come and go, so that lists of many sizes are made."""
    sampling = [SamplingParams(temperature=0.0, max_tokens=6 + 5 * i, ignore_eos=True) for i in range(5)]
    answers = []
    for listed in (True, False):
        runner = make(checkpoint("llama"), threads)
        if not listed:
            runner._decode_jobs = None
        requests = [
            EngineRequest(str(i), prompt_ids(9 + 8 * i, seed=i), some, n=1 + i % 2)
            for i, some in enumerate(sampling)
        ]
        answers.append(run(engine_of(runner), *requests).tokens)
    assert answers[0] == answers[1]


@pytest.mark.parametrize(("threads", "rows"), [(1, 1), (2, 1), (2, 40), (3, 40)])
def test_a_list_runs_its_jobs_in_order(threads, rows):
    """Each adds to what the one before it wrote: 200 norms of one row, and of many."""
    source = torch.Generator().manual_seed(rows)
    start, weight = torch.randn(2, rows, 24, generator=source), torch.randn(24, generator=source)
    x = start.clone()
    jobs = []
    for number in range(200):
        first, second = x[number % 2], x[1 - number % 2]
        where = (second.data_ptr(), first.data_ptr(), weight.data_ptr(), first.data_ptr(), 24, 0, 1)
        jobs.append((ADD_NORM, rows, where))
    results = {}
    for name, team in (
        ("one thread, one by one", KernelTeam(1, torch.float32, 8)),
        ("one by one", KernelTeam(threads, torch.float32, 8)),
        ("list", KernelTeam(threads, torch.float32, 8)),
    ):
        x.copy_(start)
        if name == "list":
            team.run_all(team.compile(jobs))
        else:
            for job in jobs:
                team.run(*job)
        results[name] = x.clone()
    expected = results["one thread, one by one"]
    assert expected.isfinite().all()
    for name, got in results.items():
        assert torch.equal(got, expected), f"{name}, {threads} threads, {rows} rows: " + difference(
            got, expected
        )


def test_the_jobs_before_a_product_prefetch_its_weights():
    """Each another part of them; after the last product nothing is prefetched."""
    first, second, part = 1 << 20, 2 << 20, AHEAD_BYTES
    norm, gate = (ADD_NORM, 1, (1, 2, 3, 4, 8, 0, 0)), (GATE, 1, (1, 2, 8))
    products = [(MULTIPLY, 2, (9, 1, 64, at, 9, 9, 64)) for at in (first, second)]
    listed = KernelTeam(1, torch.bfloat16, 8).compile(
        [norm, gate, products[0], norm, gate, products[1], norm]
    )
    ahead = listed[:, AHEAD - KERNEL].tolist()
    assert ahead == [first, first + part, second, second + part, second + 2 * part, 0, 0]
    reads_first = listed[:, READS - KERNEL].tolist()
    assert reads_first == [0, 0, 1, 0, 0, 1, 0]


def test_a_job_on_its_own_prefetches_nothing(checkpoint):
    """It shares the team's numbers with the lists before it."""
    runner = make(checkpoint("llama"), 2)
    items = tokens_after([40] * 3)
    filled(runner, items, 0.0)
    runner.execute(StepPlan(items, []))
    assert runner._decode_jobs is not None
    row = runner._decode_jobs._parts.team._row
    row[AHEAD] = 1
    one_by_one(runner, StepPlan(items, []))
    assert row[AHEAD] == 0


def test_panels_begin_a_huge_page():
    """From 2 MiB on: a row is multiplied from them at the speed of reading."""
    weight = torch.arange(1024 * 1056, dtype=torch.float32).to(torch.bfloat16).view(1056, 1024)
    panels = bf16.pack(weight)
    assert panels.data_ptr() % huge_pages.HUGE_PAGE == 0
    assert torch.equal(panels.transpose(1, 2).reshape(1056, 1024), weight)


def difference(got: Tensor, expected: Tensor) -> str:
    """Where two tensors differ, and by how much."""
    where = (got != expected).nonzero()
    found = [
        f"{at}: {got[tuple(at)].item()!r}, expected {expected[tuple(at)].item()!r}"
        for at in where[:5].tolist()
    ]
    most = (got - expected).abs().max().item()
    return f"{len(where)} of {got.numel()} numbers differ, by {most} at most; at " + "; ".join(found)


def test_a_helper_that_has_left_is_called_again_before_its_thread_is_free():
    """It returns from the kernels before it has the interpreter's lock: until then its future is not done."""
    team = KernelTeam(3, torch.float32, 8)
    called = []

    class Waiting:
        def submit(self, *call: object) -> Future[None]:
            called.append(call)
            return Future()

    team._helpers = Waiting()  # type: ignore[assignment]
    team._wake()
    assert len(called) == 2
    team._wake()
    assert len(called) == 2
    team._row[LEFT] += 1
    team._wake()
    assert len(called) == 3


def test_a_helper_keeps_the_numbers_that_it_polls():
    """A team may be gone while its helper still looks for shares."""
    team, held = KernelTeam(2, torch.float32, 8), []

    class Busy:
        def submit(self, *call: object) -> Future[None]:
            held.append(call)
            return Future()

    team._helpers = Busy()  # type: ignore[assignment]
    team._wake()
    numbers = weakref.ref(team._row)
    del team
    gc.collect()
    assert numbers() is not None and held
