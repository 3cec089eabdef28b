"""Step buffers for tests that call attention without an engine."""

from __future__ import annotations

import torch

from engine.plan import PlanItem, StepPlan
from engine.step_buffers import StepBuffers
from engine.step_delta import StepDelta


def buffers_of(items: list[PlanItem], page: int, device: str = "cpu") -> StepBuffers:
    """With these items loaded, each in its row."""
    rows = max(item.row for item in items) + 1
    width = max(max(len(item.block_ids), -(-item.end // page)) for item in items)
    tokens = sum(len(item.token_ids) for item in items)
    buffers = StepBuffers(rows, width, tokens, page, torch.device(device))
    buffers.load(StepDelta.of(StepPlan(items, [])))
    return buffers
