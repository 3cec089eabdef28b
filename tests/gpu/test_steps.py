"""Decode steps on the GPU: recorded ones give what plain ones give, steps launched ahead what steps in turn give, the
device's sampler what the CPU's gives; and nothing in between waits for the device."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from cluster.config.worker import EngineConfig
from engine.build import load_model
from engine.engine import Engine
from engine.plan import PlanItem, StepPlan
from engine.request import EngineRequest, SamplingParams
from engine.runner import ModelRunner
from engine.sampling.device_sampler import DeviceDraw, DeviceSampler
from engine.sampling.masks import mask_of
from engine.sampling.row import Row
from engine.sampling.sampler import Sampled, sample
from tests.harness.checkpoints import prompt_ids

pytestmark = pytest.mark.gpu
PAGE = 256  # which every paged kernel takes
KV_BYTES = 512 << 20


@contextmanager
def no_waits(device: str) -> Iterator[None]:
    """An error where the host waits for the device."""
    if device == "cuda":
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        if device == "cuda":
            torch.cuda.set_sync_debug_mode("default")


def runner_of(model, device: str, **settings: object) -> ModelRunner:
    given: dict[str, Any] = {"dtype": "bfloat16", **settings}
    config = EngineConfig(
        model=model, device=device, page_size=PAGE, kv_memory_bytes=KV_BYTES, max_batch_requests=16, **given
    )
    return ModelRunner(load_model(config))


def tokens_of(count: int) -> list[PlanItem]:
    return [PlanItem(str(i), [3 + i], 5 * i, [i], i, 1) for i in range(count)]


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 8, 13, 16])
def test_recorded_steps_are_the_plain_ones(count, device, model):
    """To the last bit where nothing is padded; else products have another shape."""
    if device != "cuda":
        pytest.skip("only CUDA records")
    recorded, plain = runner_of(model("llama"), device), runner_of(model("llama"), device, cuda_graphs=False)
    if recorded._graphs is None:
        pytest.skip("the attention backend here can't be captured")
    recorded.warm_up()
    torch.manual_seed(0)
    keys = torch.randn_like(plain.kv_cache[:16])
    logits = []
    for runner in (plain, recorded, recorded):
        runner.kv_cache[:16] = keys
        logits.append(runner.execute(StepPlan(tokens_of(count), [])).clone())
    assert torch.equal(logits[1], logits[2])
    if count in recorded._graphs.sizes:
        assert torch.equal(logits[0], logits[1])
    torch.testing.assert_close(logits[0], logits[1], atol=0.1, rtol=0.05)


def test_a_recorded_step_waits_for_nothing(device, model):
    runner = runner_of(model("llama"), device)
    runner.warm_up()
    plan = StepPlan(tokens_of(7), [])
    runner.execute(plan)
    drawn = torch.arange(7, device=runner.device)
    with no_waits(device):
        runner.execute(plan, drawn)


def test_a_part_of_a_prompt_is_waited_for(device, model):
    """The host would overwrite what the device has not copied yet."""
    if device != "cuda":
        pytest.skip("a CPU has nothing to wait for")
    runner = runner_of(model("llama"), device, max_batch_tokens=16)
    engine = Engine(runner, runner.config, secret=b"gpu")
    engine.add(EngineRequest("long", prompt_ids(200), SamplingParams(temperature=0.0, max_tokens=1)))
    while engine.has_work:
        engine.step()
        assert torch.cuda.current_stream(runner.device).query()


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_steps_launched_ahead_give_the_same(temperature, device, model):
    """In fp32: a sequence that has ended is in one step more, so that steps have other sizes, and other last bits; in bf16
    many of a small model's logits are that near to each other."""
    answers = []
    for overlap in ("off", "on"):
        runner = runner_of(model("llama"), device, overlap=overlap, dtype="float32")
        runner.warm_up()
        engine = Engine(runner, runner.config, secret=b"gpu")
        for i in range(6):
            sampling = SamplingParams(
                temperature=temperature, top_p=0.9, seed=i, max_tokens=20 + 5 * i, ignore_eos=i % 2 == 0
            )
            engine.add(EngineRequest(str(i), prompt_ids(40 + 9 * i, seed=i), sampling))
        tokens: list[tuple[str, int, int]] = []
        while engine.has_work:
            tokens += [(one.request_id, one.position, one.token_id) for one in engine.step().tokens]
        assert engine.stats().blocks_held == 0
        answers.append(sorted(tokens))
    assert answers[0] == answers[1]


def some_rows(vocab: int) -> list[Row]:
    """Every kind of setting, alone and together."""
    settings = [
        SamplingParams(
            temperature=0.0 if i % 5 == 0 else 0.5 + i % 3,
            top_k=(0, 40, 3)[i % 3],
            top_p=(1.0, 0.9, 0.3)[i // 3 % 3],
            min_p=0.02 * (i % 2),
            repetition_penalty=1.0 + 0.2 * (i % 4 == 1),
            frequency_penalty=0.5 * (i % 4 == 2),
            logit_bias={7: 2.0} if i % 6 == 3 else {},
            logprobs=i % 7 == 0,
            top_logprobs=i % 4,
            seed=i,
        )
        for i in range(120)
    ]
    allowed = mask_of(b"\x96" * (vocab // 8), vocab)
    return [
        Row(
            one,
            i % 3,
            [1, 2, 7, 7, 9],
            2,
            (5, 5, 7) if i % 8 == 0 else (),
            allowed=allowed if i % 9 == 4 else None,
        )
        for i, one in enumerate(settings)
    ]


@pytest.mark.parametrize("vocab", [1000, 32000, 128256])
def test_the_sampler_draws_what_the_cpu_draws(vocab, device):
    rows = some_rows(vocab)
    logits = 4 * torch.randn(len(rows), vocab, generator=torch.Generator().manual_seed(0))
    there, sampler = logits.to(device), DeviceSampler(torch.device(device))
    source = list(range(len(rows)))
    sampler.begin(there, source, rows).results()
    sampler.begin(there, source, rows).results()
    with no_waits(device):
        draw = sampler.begin(there, source, rows)
    assert isinstance(draw, DeviceDraw)
    different = 0
    for row, got, expected in zip(rows, draw.results(), sample(logits, rows), strict=True):
        assert isinstance(got, Sampled) and isinstance(expected, Sampled)
        if row.params.temperature == 0.0 or row.params.top_k == 1:
            assert got.token_id == expected.token_id
        different += got.token_id != expected.token_id
    assert different <= 1, "near-ties are rare"
