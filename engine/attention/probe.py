"""Checks a paged attention kernel: calls it on a few tokens and compares the result with plain matrix products.

Importing the package is not enough: the install may be broken, built for another torch or GPU, or of a version whose
arguments have another meaning, which gives wrong output without an error.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from cluster.protocol.kv_format import SCALE_BYTES
from engine import kv_blocks
from engine.attention.base import AttentionShape, MakeBackend
from engine.attention.sdpa import SdpaBackend
from engine.ops.team import Team
from engine.plan import PlanItem, StepPlan
from engine.step_buffers import StepBuffers
from engine.step_delta import StepDelta

HEADS, KV_HEADS, BLOCKS = 4, 2, 5
CAP = 1.0  # of scores, most of which are as large or larger
SINKS = (-1.0, 0.0, 1.0, 2.0)
TOLERANCE = 5e-2  # absolute; for bf16 values of magnitude 1


def why_not(
    make: Callable[[], MakeBackend],
    device: torch.device,
    dtype: torch.dtype,
    head_dim: int,
    page_size: int,
    *,
    capped: bool = False,
    sinks: bool = False,
    int8_kv: bool = False,
) -> str:
    """Return why the backend cannot be used, or "" if it works. `make` imports it and its kernel; `capped`, `sinks` and
    `int8_kv`: it is called with a cap of scores, with attention sinks, and over a KV cache in int8."""
    try:
        backend = make()
        for window in (0, page_size // 2):
            shape = AttentionShape(
                HEADS,
                KV_HEADS,
                head_dim,
                page_size,
                (window,),
                cap=CAP if capped else 0.0,
                sinks=torch.tensor([SINKS], device=device) if sinks else None,
            )
            for items in _steps(page_size):
                if not _right(backend, shape, items, device, dtype, int8_kv=int8_kv):
                    return "is installed, but its output is not attention: wrong results on this device"
    except Exception as error:  # whatever a broken install, or a kernel that lacks this card, raises
        return f"does not work here ({type(error).__name__}: {str(error).strip() or 'no reason given'})"
    return ""


def _steps(page: int) -> list[list[PlanItem]]:
    """Two steps: a chunk that crosses blocks beside a single token, and single tokens only."""
    chunk = PlanItem("chunk", [0] * 6, page - 3, [3, 1], 0, 1)
    return [
        [chunk, PlanItem("token", [0], 4, [4], 1, 1)],
        [PlanItem("long", [0], 2 * page - 2, [0, 2], 0, 1), PlanItem("token", [0], 4, [4], 1, 1)],
    ]


@torch.inference_mode()
def _right(
    make: MakeBackend,
    shape: AttentionShape,
    items: list[PlanItem],
    device: torch.device,
    dtype: torch.dtype,
    *,
    int8_kv: bool,
) -> bool:
    random = torch.Generator().manual_seed(len(items[0].token_ids))
    page, dim = shape.page_size, shape.head_dim

    def draw(*size: int) -> Tensor:
        return torch.randn(*size, generator=random).to(device, dtype)

    values = cache = draw(BLOCKS, 1, 2, KV_HEADS, page, dim)
    if int8_kv:
        cache = torch.zeros(*values.shape[:-1], dim + SCALE_BYTES, dtype=torch.int8, device=device)
        kv_blocks.write(cache, 0, values)
        values = kv_blocks.read(cache, dtype)
    places = [(item.block_ids[at // page], at % page) for item in items for at in range(item.begin, item.end)]
    k, v = (torch.stack([values[block, 0, which, :, offset] for block, offset in places]) for which in (0, 1))
    q = draw(len(places), HEADS, dim)
    buffers = StepBuffers(2, 2, len(places), page, device)
    buffers.load(StepDelta.of(StepPlan(items, [])))
    paged = make(replace(shape, dtype=dtype), cache)
    paged.begin(buffers)
    got = paged.attend(0, q, k, v)
    plain = SdpaBackend(shape, values.float(), Team(1))
    plain.begin(buffers)
    expected = plain.attend(0, q.float(), k.float(), v.float())
    return torch.allclose(got.float(), expected, atol=TOLERANCE, rtol=TOLERANCE)
