"""Embeddings: a prompt's hidden states after the final norm, pooled in float32 over its chunks.

Every rank has the hidden states of all dimensions, so the leader pools alone.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from cluster.errors import EngineRequestError
from cluster.protocol.pooling import Pooling
from engine.step_delta import StepDelta


def pool(hidden: Tensor, delta: StepDelta) -> list[Tensor]:
    """For each pooled item of the step, its rows' part of the vector: float32 [hidden]. `hidden` is [tokens, hidden]."""
    firsts = (delta.counts.cumsum() - delta.counts).tolist()
    return [
        _part(Pooling(kind), hidden[firsts[item] : firsts[item] + rows])
        for item, rows, kind in delta.pooled.tolist()
    ]


def _part(kind: Pooling, rows: Tensor) -> Tensor:
    """Pool these rows alone; of a mean, their sum. A copy: the next step writes to the hidden states' memory."""
    if kind is Pooling.MEAN:
        return rows.sum(0, dtype=torch.float32)
    if kind is Pooling.MAX:
        return rows.amax(0).float()
    return rows[0 if kind is Pooling.CLS else -1].to(torch.float32, copy=True)


def joined(kind: Pooling, before: Tensor | None, part: Tensor) -> Tensor:
    """Combine the pooled chunks so far (`before`, None at first) with the next one."""
    if before is None or kind is Pooling.LAST_TOKEN:
        return part
    if kind is Pooling.CLS:
        return before
    return before + part if kind is Pooling.MEAN else torch.maximum(before, part)


def vector(kind: Pooling, whole: Tensor, tokens: int) -> bytes:
    """The embedding of a prompt of so many tokens, from what all its chunks come to: little-endian float32.

    Raises EngineRequestError if it is not finite.
    """
    values = (whole / tokens if kind is Pooling.MEAN else whole).cpu().numpy()
    if not np.isfinite(values).all():
        raise EngineRequestError("the model's hidden states are not finite")
    return bytes(values.astype("<f4").tobytes())
