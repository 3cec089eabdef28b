"""Whether workers with the chart's values fit a card, by the rule that sizes KV pools (engine/kv_cache.py)."""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from cluster.config.worker import EngineConfig, Role, TransferConfig
from engine import build, kv_cache
from engine.device_memory import CONTEXT_BYTES
from engine.graphs.decode_graphs import sizes_for
from engine.kv_cache import Needs
from engine.model.config import ModelConfig
from tests.engine.fake_memory import GIB, FakeMemory
from tests.engine.shapes import SHAPES

CHART = Path(__file__).resolve().parents[2] / "deploy" / "helm" / "baton"
# What CUDA reports as total, by the node label nvidia.com/gpu.product.
CARDS = {
    "NVIDIA-L4": 22.0,
    "NVIDIA-L40S": 44.4,
    "NVIDIA-A100-SXM4-40GB": 39.4,
    "NVIDIA-A100-SXM4-80GB": 79.1,
    "NVIDIA-H100-80GB-HBM3": 79.1,
    "NVIDIA-H200": 139.8,
}
PRODUCT = "nvidia.com/gpu.product"


def merged(below: Any, above: Any) -> Any:
    if not isinstance(below, Mapping) or not isinstance(above, Mapping):
        return copy.deepcopy(above)
    return {**below, **{name: merged(below.get(name), value) for name, value in above.items()}}


def values_of(text: str) -> dict[str, Any]:
    values: dict[str, Any] = merged(yaml.safe_load((CHART / "values.yaml").read_text()), yaml.safe_load(text))
    return values


def model_of(values: dict[str, Any]) -> ModelConfig:
    name = re.split(r"[/@]", values["model"]["source"])
    return next(shape for known, shape in SHAPES.items() if known in [part.lower() for part in name])


def engine_of(values: dict[str, Any], role: Role, model: ModelConfig) -> EngineConfig:
    pool = values[role]
    return EngineConfig(
        model=Path("/m"),
        device="cuda",
        dtype=pool["dtype"] or values["model"]["dtype"],
        max_model_len=values["model"]["maxModelLen"] or model.max_model_len,
        page_size=values["model"]["pageSize"],
        tensor_parallel=pool["tensorParallel"],
        kv_memory_bytes=pool["kvMemoryBytes"],
        memory_utilization=pool["memoryUtilization"],
        max_batch_tokens=pool["maxBatchTokens"],
        max_batch_requests=pool["maxBatchRequests"],
    )


def step_bytes(model: ModelConfig, config: EngineConfig) -> int:
    """An upper estimate of what the largest step takes with a paged attention kernel."""
    itemsize = 4 if config.dtype == "float32" else 2
    tokens, ranks = config.step_tokens, config.tensor_parallel
    kv_heads = max(1, model.num_kv_heads // ranks)
    heads = model.num_heads // ranks + 2 * kv_heads
    widths = 6 * model.hidden_size + 3 * heads * model.head_dim + 4 * model.intermediate_size // ranks
    gathered = 4 * kv_heads * model.head_dim * config.max_model_len  # one context's keys and values, twice
    table = tokens * -(-config.max_model_len // config.page_size) * 4
    sampler = min(config.max_batch_requests, tokens) * model.vocab_size * 64  # sums in double precision
    return itemsize * (tokens * widths + gathered) + table + sampler


def recorded_bytes(model: ModelConfig, config: EngineConfig) -> int:
    """The null block, and of recorded decode steps the logits and a step of so many tokens."""
    sequences = sizes_for(config.max_batch_requests)[-1]
    decode = config.model_copy(update={"max_batch_tokens": sequences, "max_batch_requests": sequences})
    return build.block_bytes(model, config) + sequences * model.vocab_size * 4 + step_bytes(model, decode)


def needs_of(values: dict[str, Any], role: Role, model: ModelConfig, config: EngineConfig) -> Needs:
    """What a rank takes beside its KV pool."""
    handoff = values["transfer"]["ringMaxBytes"] if role == "decode" else TransferConfig().staging_bytes
    weights, step = build.weight_bytes(model, config), step_bytes(model, config)
    return Needs(weights, step, handoff, recorded_bytes(model, config))


def memory_of(card: str) -> FakeMemory:
    return FakeMemory(int(CARDS[card] * GIB), CONTEXT_BYTES)


def check(text: str, role: Role, card: str) -> None:
    """Raises ConfigError if the example does not fit."""
    values = values_of(text)
    model = model_of(values)
    config = engine_of(values, role, model)
    needs = needs_of(values, role, model, config)
    kv_cache.check_before_load(config, build.block_bytes(model, config), memory_of(card), needs)


def card_of(text: str, role: Role) -> str:
    """The card that the pool selects, else the smallest one that the example's head names."""
    selected = values_of(text)[role]["pod"]["nodeSelector"].get(PRODUCT)
    named = re.search(r"^# Smallest card: (.+)\.$", text, re.MULTILINE)
    card = selected or (named.group(1) if named else "")
    assert card in CARDS, f"{role}: no card of {list(CARDS)} in a nodeSelector or in '# Smallest card: NAME.'"
    return str(card)
