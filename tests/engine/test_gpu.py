"""On a CUDA card: the engine's answers are the CPU's, and its figures stand beside the card's own bandwidth.

Run by `make gpu-check` with whatever Python and torch the machine has.
"""

from __future__ import annotations

import time

import pytest
import torch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
NEW = 32


def generate(model, prompts, **settings):
    from cluster.config import EngineConfig
    from engine.build import load_runner
    from engine.engine import Engine
    from engine.request import EngineRequest, SamplingParams

    runner = load_runner(EngineConfig(model=model, kv_memory_bytes=256 << 20, **settings))
    engine = Engine(runner, runner.config, secret=b"gpu")
    greedy = SamplingParams(temperature=0.0, max_tokens=NEW, ignore_eos=True)
    for index, prompt in enumerate(prompts):
        engine.add(EngineRequest(str(index), prompt, greedy))
    tokens: dict[str, list[int]] = {}
    while engine.has_work:
        for token in engine.step().tokens:
            tokens.setdefault(token.request_id, []).append(token.token_id)
    return tokens


@pytest.mark.parametrize("variant", ["llama", "qwen2-window", "qwen3", "mistral"])
def test_cuda_and_cpu_say_the_same_in_fp32(variant, tmp_path):
    pytest.importorskip("transformers", reason="transformers writes the checkpoints")
    from tests.checkpoints import make_checkpoint, prompt_ids

    model = make_checkpoint(tmp_path, variant)
    prompts = [prompt_ids(70), prompt_ids(33, seed=1)]
    # fp32 goes through plain products on both: the paged kernels take 16-bit types only.
    on_card = generate(model, prompts, device="cuda", dtype="float32", attention_backend="sdpa")
    on_cpu = generate(model, prompts, device="cpu", dtype="float32")
    assert on_card == on_cpu


def test_figures(capsys):
    """Memory bandwidth of the card by a device-to-device copy, for the figures that docs/results.md quotes."""
    source = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    times = []
    for _ in range(7):
        torch.cuda.synchronize()
        began = time.perf_counter()
        target.copy_(source)
        torch.cuda.synchronize()
        times.append(time.perf_counter() - began)
    with capsys.disabled():
        rate = 2 * source.numel() / sorted(times)[3] / 1e9
        print(f"\n{torch.cuda.get_device_name()}: copy bandwidth {rate:.0f} GB/s")
    assert torch.equal(source[:1024], target[:1024])
