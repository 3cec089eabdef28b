"""Every example of the chart fits the cards it is for, by the rule that sizes KV pools (engine/kv_cache.py)."""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from bench.checkpoint import ModelShape, write_model
from cluster.config.worker import EngineConfig, Role, TransferConfig
from cluster.errors import ConfigError
from engine import build, kv_cache, largest_step
from engine.device_memory import CONTEXT_BYTES
from engine.graphs.decode_graphs import sizes_for
from engine.kv_cache import Needs
from engine.model.config import ModelConfig
from tests.engine.fake_memory import GIB, FakeMemory
from tests.engine.shapes import SHAPES

CHART = Path(__file__).resolve().parents[2] / "deploy" / "helm" / "baton"
EXAMPLES = sorted((CHART / "values").glob("*.yaml"))
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
# What the host's matrix products keep beside their results: 30 MB on a processor with AMX, little without.
SCRATCH_BYTES = 64 << 20


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
    """An upper estimate of what the largest step takes with a paged attention kernel, in bf16."""
    tokens, ranks = config.step_tokens, config.tensor_parallel
    kv_heads = max(1, model.num_kv_heads // ranks)
    heads = model.num_heads // ranks + 2 * kv_heads
    widths = 6 * model.hidden_size + 3 * heads * model.head_dim + 4 * model.intermediate_size // ranks
    gathered = 4 * kv_heads * model.head_dim * config.max_model_len  # one context's keys and values, twice
    table = tokens * -(-config.max_model_len // config.page_size) * 4
    sampler = min(config.max_batch_requests, tokens) * model.vocab_size * 64  # sums in double precision
    return 2 * (tokens * widths + gathered) + table + sampler


def recorded_bytes(model: ModelConfig, config: EngineConfig) -> int:
    """The null block, and of recorded decode steps the logits and a step of so many tokens."""
    sequences = sizes_for(config.max_batch_requests)[-1]
    decode = config.model_copy(update={"max_batch_tokens": sequences, "max_batch_requests": sequences})
    return build.block_bytes(model, config) + sequences * model.vocab_size * 4 + step_bytes(model, decode)


def check(text: str, role: Role, card: str) -> None:
    """Raises ConfigError if the example does not fit."""
    values = values_of(text)
    model = model_of(values)
    config = engine_of(values, role, model)
    handoff = values["transfer"]["ringMaxBytes"] if role == "decode" else TransferConfig().staging_bytes
    needs = Needs(
        build.weight_bytes(model, config), step_bytes(model, config), handoff, recorded_bytes(model, config)
    )
    memory = FakeMemory(int(CARDS[card] * GIB), CONTEXT_BYTES)
    kv_cache.check_before_load(config, build.block_bytes(model, config), memory, needs)


def card_of(text: str, role: Role) -> str:
    """The card that the pool selects, else the smallest one that the example's head names."""
    selected = values_of(text)[role]["pod"]["nodeSelector"].get(PRODUCT)
    named = re.search(r"^# Smallest card: (.+)\.$", text, re.MULTILINE)
    card = selected or (named.group(1) if named else "")
    assert card in CARDS, f"{role}: no card of {list(CARDS)} in a nodeSelector or in '# Smallest card: NAME.'"
    return str(card)


@pytest.mark.parametrize("role", ["prefill", "decode"])
@pytest.mark.parametrize(
    "example", [file for file in EXAMPLES if "gpus: 0" not in file.read_text()], ids=lambda f: f.stem
)
def test_an_example_fits_its_card(example: Path, role: Role) -> None:
    text = example.read_text()
    check(text, role, card_of(text, role))


@pytest.mark.parametrize(
    "limits",
    [
        (512, 64, 4096),
        *(pytest.param(one, marks=pytest.mark.long) for one in ((2048, 256, 4096), (4096, 16, 4096))),
    ],
)
def test_the_estimate_is_above_what_a_step_takes_here(
    limits: tuple[int, int, int], tmp_path, monkeypatch
) -> None:
    tokens, requests, length = limits
    write_model(tmp_path, ModelShape(layers=2))
    taken: list[int] = []
    measure = largest_step.bytes_taken

    def noted(*arguments: Any) -> int:
        taken.append(measure(*arguments))
        return taken[-1]

    monkeypatch.setattr(largest_step, "bytes_taken", noted)
    config = EngineConfig(
        model=tmp_path,
        device="cpu",
        max_batch_tokens=tokens,
        max_batch_requests=requests,
        max_model_len=length,
    )
    # The first one loads kernels too; what else this process allocates meanwhile adds to any of them.
    for _ in range(3):
        build.load_model(config)
    model, resolved = build.check(config)
    estimate = step_bytes(model, resolved)
    assert estimate / 4 < min(taken[1:]) < estimate + SCRATCH_BYTES


def test_the_examples_are_all_there() -> None:
    """Not a folder that was moved."""
    assert len(EXAMPLES) >= 7


def test_a_pool_of_80_gib_beside_weights_of_66_gib_does_not_fit_an_h200() -> None:
    """What the example once said."""
    text = (CHART / "values" / "two-gpu-types.yaml").read_text()
    spoiled = text.replace("  tensorParallel: 2\n", f"  tensorParallel: 2\n  kvMemoryBytes: {80 * GIB}\n")
    with pytest.raises(ConfigError, match="kv_memory"):
        check(spoiled, "decode", "NVIDIA-H200")


@pytest.mark.parametrize(
    ("example", "card"),
    [("one-gpu-node", "NVIDIA-L4"), ("rdma-mtls", "NVIDIA-A100-SXM4-40GB"), ("multi-node", "NVIDIA-L40S")],
)
def test_a_smaller_card_is_too_small(example: str, card: str) -> None:
    text = (CHART / "values" / f"{example}.yaml").read_text()
    with pytest.raises(ConfigError, match="memory_utilization"):
        check(text, "decode", card)


def test_a_worker_without_a_card_has_a_limit_or_a_size() -> None:
    """Else its pool would fill the node."""
    for role in ("prefill", "decode"):
        pool = values_of((CHART / "values" / "cpu-demo.yaml").read_text())[role]
        assert pool["gpus"] == 0 and pool["resources"]["limits"]["memory"] and pool["kvMemoryBytes"]
