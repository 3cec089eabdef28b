"""Steps that take the most memory: run once after the weights are loaded, before the KV pool is allocated.

The largest step has the most tokens and the most sequences of any step. One sequence ends at the longest context, where
attention gathers the most keys. It computes only as many tokens as attention takes at a time, because each of them reads
the keys of the whole context. All sequences share one block: the result is noise, the memory is that of a real step.

Recorded decode steps need memory of their own, though they never run at the same time: replays use fixed addresses.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from cluster.config.worker import EngineConfig
from cluster.errors import ConfigError
from engine.attention.base import AttentionBackend
from engine.device_memory import DeviceMemory
from engine.graphs.decode_graphs import sizes_for
from engine.model.decoder import Decoder
from engine.ops.base import LayerOps
from engine.parallel.group import TpGroup
from engine.plan import PlanItem, StepPlan
from engine.request import SamplingParams
from engine.sampling.grammar.base import all_allowed
from engine.sampling.registry import sampler_for
from engine.sampling.row import Row
from engine.step_buffers import StepBuffers
from engine.step_delta import StepDelta

# Tokens of one sequence that a backend computes at a time (engine/attention/sdpa.py).
CONTEXT_ROWS = 256
MakeBackends = Callable[[Tensor], tuple[LayerOps, AttentionBackend]]  # over a KV cache


def plan(config: EngineConfig) -> StepPlan:
    """The largest step. `config` is resolved."""
    longest = config.max_model_len
    tokens = config.step_tokens
    sequences = min(config.max_batch_requests, tokens)
    rows = min(CONTEXT_ROWS, longest, tokens - sequences + 1)
    spans = [(longest - rows, rows)]
    rest = tokens - rows
    while rest > 0:
        # The others: prompts, as long as more tokens are left than sequences, then single tokens.
        count = max(1, min(longest, rest - max(0, sequences - len(spans) - 1)))
        spans.append((0, count))
        rest -= count
    blocks = [0] * config.context_blocks
    items = [
        PlanItem(f"largest-{row}", [0] * count, begin, blocks, row, 1)
        for row, (begin, count) in enumerate(spans)
    ]
    return StepPlan(items, [])


@torch.inference_mode()
def bytes_taken(
    config: EngineConfig,
    decoder: Decoder,
    group: TpGroup,
    ops: LayerOps,
    attention: AttentionBackend,
    memory: DeviceMemory,
) -> int:
    """Bytes that the largest step takes of a rank's memory while it runs, with its buffers.

    Every rank of the group must call it. The KV cache of `ops` and `attention` has one block. Raises ConfigError if the
    step does not fit.
    """
    memory.begin_peak()
    try:
        logits = run(config, decoder, plan(config), ops, attention)
        _draw(group, logits)
        del logits
    except torch.OutOfMemoryError as error:
        raise does_not_fit(config, error) from None
    return memory.peak_bytes()


def does_not_fit(config: EngineConfig, error: torch.OutOfMemoryError) -> ConfigError:
    return ConfigError(
        f"max_batch_tokens: a step of {config.step_tokens} tokens and {config.max_batch_requests} requests does not "
        f"fit beside the weights: {error}",
        field="max_batch_tokens",
    )


@torch.inference_mode()
def recorded_bytes(
    config: EngineConfig, decoder: Decoder, make: MakeBackends, cache: Tensor, memory: DeviceMemory
) -> int:
    """Bytes of a rank's memory that recorded decode steps keep: their logits, and a memory pool as large as the largest
    of them needs.

    Every rank of the group must call it. `cache` has one block. Raises ConfigError if they do not fit.
    """
    sequences = sizes_for(config.max_batch_requests)[-1]
    items = [PlanItem(f"recorded-{row}", [0], 0, [0], row, 1) for row in range(sequences)]
    memory.begin_peak()
    try:
        logits = run(config, decoder, StepPlan(items, []), *make(cache), bounded=True)
        kept = logits.numel() * logits.itemsize
        del logits
    except torch.OutOfMemoryError as error:
        raise ConfigError(
            f"max_batch_requests: a recorded step of {sequences} requests does not fit beside the weights: {error}",
            field="max_batch_requests",
        ) from None
    return memory.peak_bytes() + kept


@torch.inference_mode()
def run(
    config: EngineConfig,
    decoder: Decoder,
    step_plan: StepPlan,
    ops: LayerOps,
    attention: AttentionBackend,
    *,
    bounded: bool = False,
) -> Tensor:
    """float32 logits [items, vocab] of the step. `bounded`: for the longest context, as steps are recorded."""
    rows = max(config.max_batch_tokens, len(step_plan.items))
    tokens = max(config.step_tokens, rows)
    step = StepBuffers(rows, config.context_blocks, tokens, config.page_size, decoder.embedding.device)
    step.load(StepDelta.of(step_plan))
    if bounded:
        step.bound_lengths()
    ops.begin(step.positions, step.slots)
    attention.begin(step)
    hidden = decoder.forward(step.tokens, ops, attention.attend)
    return decoder.logits(hidden[step.logit_rows])


def _draw(group: TpGroup, logits: Tensor) -> None:
    """Run the two draws that take the most memory: of every row from all tokens, and of every row from those that top-p
    keeps of nearly equal logits. The first one's results are read last, as a step's are while the next one is computed."""
    if group.rank > 0:
        return
    sampler, rows = sampler_for(logits.device), range(logits.shape[0])
    more: dict[str, Any] = {"logprobs": True, "top_logprobs": 20, "logit_bias": {0: 1.0}}
    mask = all_allowed(logits.shape[1])
    draws = [
        sampler.begin(logits, list(rows), [Row(params, 0, [0], 1, (), mask) for _ in rows])
        for params in (
            SamplingParams(temperature=1.0, **more),
            SamplingParams(temperature=100.0, top_p=0.9, **more),
        )
    ]
    for one in draws:
        one.results()
