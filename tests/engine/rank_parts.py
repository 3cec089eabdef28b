"""Parts of KV between the ranks of two runners."""

from __future__ import annotations

import secrets

import torch

from engine.engine import Engine
from engine.request import EngineRequest, SamplingParams
from engine.runner import ModelRunner
from kv_transfer.layout.geometry import gather, plan_flows, scatter
from kv_transfer.layout.rows import CacheRegion

NEW = 32
GREEDY = SamplingParams(temperature=0.0, max_tokens=NEW, ignore_eos=True)


def compute_prompt(engine: Engine, prompt):
    """The first token; the request's blocks are held until it is released."""
    engine.add(EngineRequest("r", prompt, GREEDY, prefill_only=True))
    while True:
        if (step := engine.step()).tokens:
            return step.tokens


def move(sources: list[ModelRunner], from_blocks, targets: list[ModelRunner], to_blocks, count: int) -> None:
    """Part by part, as the wire carries them: each flow's heads of all layers, in two pieces, one cut inside a block."""
    config, page = sources[0].model_config, sources[0].page_size
    cut = count // 2 // page * page
    for flow in plan_flows(config.num_kv_heads, len(sources), len(targets), secrets.token_bytes(16)):
        source, target = sources[flow.source_rank], targets[flow.target_rank]
        for tokens in (range(cut), range(cut, count)):
            blocks = slice(tokens.start // page, -(-tokens.stop // page))
            size = len(tokens) * config.num_layers * 2 * (flow.head_end - flow.head_begin) * config.head_dim
            part = torch.empty(size)
            gather(
                source.kv_cache,
                part,
                CacheRegion(layers(source), heads(source, flow), tokens, from_blocks[blocks]),
            )
            scatter(
                target.kv_cache,
                part,
                CacheRegion(layers(target), heads(target, flow), tokens, to_blocks[blocks]),
            )


def layers(runner: ModelRunner) -> range:
    return range(runner.model_config.num_layers)


def heads(runner: ModelRunner, flow) -> range:
    """The flow's heads, counted from the rank's first."""
    begin, end = runner.kv_head_range
    assert begin <= flow.head_begin < flow.head_end <= end
    return range(flow.head_begin - begin, flow.head_end - begin)
