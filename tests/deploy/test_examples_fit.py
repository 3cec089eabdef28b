"""Every example of the chart fits the cards it is for, by the rule that sizes KV pools (engine/kv_cache.py)."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.checkpoint import ModelShape, write_model
from cluster.config.worker import EngineConfig, Role
from cluster.errors import ConfigError
from engine import build
from tests.deploy.fit import CHART, card_of, check, step_bytes, values_of
from tests.engine.fake_memory import GIB, noted_step_bytes

EXAMPLES = sorted((CHART / "values").glob("*.yaml"))
# What the host's matrix products keep beside their results: 30 MB on a processor with AMX, little without.
SCRATCH_BYTES = 64 << 20


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
    taken = noted_step_bytes(monkeypatch)
    config = EngineConfig(
        model=tmp_path,
        device="cpu",
        dtype="float32",  # processors without AVX-512 take up to eight times as long in bf16
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
