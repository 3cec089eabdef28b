"""The draw of the largest step takes as much memory as any other draw of as many rows."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from engine import largest_step
from engine.parallel.group import NullGroup
from engine.request import SamplingParams
from engine.sampling import cuts, draw
from engine.sampling.base import Sampler
from engine.sampling.device_sampler import DeviceSampler
from engine.sampling.host_sampler import HostSampler
from engine.sampling.row import Row
from tests.harness.live_bytes import taken

CPU = torch.device("cpu")
ROWS, VOCAB = 32, 16000
SETTINGS: list[dict[str, Any]] = [
    {},
    {"top_p": 0.9},
    {"top_k": 40, "min_p": 0.01},
    {"repetition_penalty": 1.1, "frequency_penalty": 0.5},
    {"top_p": 0.5, "logprobs": True, "top_logprobs": 5, "logit_bias": {3: 1.0}},
    {"logprobs": True, "logit_bias": {3: 1.0}},
    {"temperature": 0.0, "logprobs": True},
]


def draw_with(sampler: Sampler, logits: Tensor, settings: dict[str, Any]) -> None:
    params = SamplingParams(**{"temperature": 1.0, **settings})
    sampler.begin(logits, list(range(ROWS)), [Row(params, 0, [5, 7], 1, ())] * ROWS).results()


@pytest.mark.parametrize("kind", ["device", "host"])
@pytest.mark.parametrize(
    "width", [1.0, *(pytest.param(other, marks=pytest.mark.long) for other in (0.01, 8.0))]
)
def test_no_draw_takes_more(kind, width, monkeypatch):
    """Whatever the logits are: those of the largest step are noise."""
    if kind == "device":
        monkeypatch.setattr(draw, "has_numba", lambda: False)
        monkeypatch.setattr(cuts, "has_numba", lambda: False)
    sampler = DeviceSampler(CPU) if kind == "device" else HostSampler()
    monkeypatch.setattr(largest_step, "sampler_for", lambda device: sampler)
    noise = torch.randn(ROWS, VOCAB, generator=torch.Generator().manual_seed(0))
    measured = taken(lambda: largest_step._draw(NullGroup(), noise * width))
    most = 0
    for some in (noise * 0.01, noise * 8.0):  # of a request: nearly all tokens are kept, or a few
        for settings in SETTINGS:
            most = max(most, taken(partial(draw_with, sampler, some, settings)))
    assert most <= measured - noise.nbytes < 2 * most
