"""The engine on the GPU: in fp32 its answers equal the CPU's, in bf16 they are as near to them as those of plain
products."""

from __future__ import annotations

import importlib.util
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from cluster.errors import ConfigError
from engine.attention import registry
from engine.attention.base import AttentionShape
from engine.attention.varlen import TORCH_PAGE_SIZES, torch_varlen
from engine.model.config import ModelConfig
from engine.ops.cpu.team import KernelTeam
from engine.ops.team import Team
from engine.plan import PlanItem, StepPlan
from tests.engine.steps import buffers_of
from tests.gpu.answers import NEW, generate, runner_of, same_but_for_ties
from tests.harness.checkpoints import EXPERTS, VARIANTS, prompt_ids
from tests.harness.mxfp4 import packed

pytestmark = pytest.mark.gpu
SHAPES = [(4, 2, 16), (4, 4, 16), (4, 1, 16), (4, 2, 32), (16, 8, 64), (32, 8, 128)]  # heads, KV heads, dim


@pytest.fixture(params=["triton", "varlen", "flash", "cpu"])
def backend(request, device):
    """Of those that `auto` may choose on this device."""
    name = request.param
    if (name == "cpu") != (device == "cpu"):
        pytest.skip(f"{name} does not run on {device}")
    if name == "cpu":
        pytest.importorskip("numba")
    if name == "triton":
        pytest.importorskip("triton")
    if name == "varlen":
        pytest.importorskip("torch.nn.attention.varlen", reason="torch has it from 2.11 on")
        try:
            torch_varlen()
        except ConfigError as error:
            pytest.skip(str(error))
    if name == "flash" and not any(importlib.util.find_spec(n) for n in ("vllm_flash_attn", "vllm")):
        pytest.skip("neither vllm_flash_attn nor vllm is installed")
    return name


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_tokens_are_the_cpus_in_fp32(variant, device, model):
    """Of plain products, and of the one paged kernel that takes fp32."""
    prompts = [prompt_ids(70), prompt_ids(33, seed=1)]
    ways = {"dtype": "float32", "attention_backend": "sdpa", "max_batch_tokens": 48}
    here = generate(model(variant), prompts, device=device, **ways)
    there = generate(model(variant), prompts, device="cpu", dtype="float32", attention_backend="sdpa")
    same_but_for_ties(model(variant), prompts, here, there)
    if device == "cuda" and importlib.util.find_spec("triton"):
        by_triton = generate(model(variant), prompts, device=device, **ways | {"attention_backend": "triton"})
        same_but_for_ties(model(variant), prompts, by_triton, there)
    assert len({token for answer in here for token in answer}) > 8, "an answer that says something"


def test_experts_in_mxfp4_give_the_cpus_tokens(device, model, tmp_path):
    path, prompts = packed(model("gpt-oss"), tmp_path / "packed"), [prompt_ids(70), prompt_ids(33, seed=1)]
    here = generate(path, prompts, device=device, dtype="float32", attention_backend="sdpa")
    there = generate(path, prompts, device="cpu", dtype="float32", attention_backend="sdpa")
    same_but_for_ties(path, prompts, here, there)


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_tokens_are_hugging_faces_in_fp32(variant, device, tmp_path):
    pytest.importorskip("transformers", reason="transformers is the reference")
    pytest.importorskip("tokenizers", reason="of the checkpoint")
    if variant == "gpt-oss" and not hasattr(
        pytest.importorskip("transformers").GptOssConfig(), "swiglu_alpha"
    ):
        pytest.skip("this transformers computes with a swiglu_alpha of 1.702, whatever the checkpoint says")
    from tests.harness.checkpoints import make_checkpoint
    from tests.harness.exactness import assert_greedy

    path, prompt = make_checkpoint(tmp_path, variant), prompt_ids(70)
    (tokens,) = generate(path, [prompt], device=device, dtype="float32", attention_backend="sdpa")
    assert_greedy(device, path, prompt, tokens)


@pytest.mark.parametrize("page", [16, 256])
@pytest.mark.parametrize("window", [0, 24])
@pytest.mark.parametrize("heads", SHAPES, ids=str)
def test_attention_in_bf16_is_that_of_plain_products(heads, window, page, backend, device):
    """Of a fresh prompt, a chunk and a token, whose blocks lie anywhere. Compared with fp32 over the same numbers."""
    shape, cache, items, q, k, v = spread_step(heads, window, page, backend, device)
    got = attend(backend, shape, cache, items, q, k, v)
    plain = attend("sdpa", shape, cache.float(), items, q.float(), k.float(), v.float())
    torch.testing.assert_close(got.float(), plain, atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("window", [0, 24])
def test_sinks_in_bf16_are_those_of_plain_products(window, backend, device):
    if backend not in registry.WITH_FEATURES:
        pytest.skip(f"{backend} has no attention sinks")
    shape, cache, items, q, k, v = spread_step((16, 2, 64), window, 16, backend, device)
    shape = replace(shape, sinks=torch.linspace(-3, 6, 32, device=device).view(2, 16))
    got = attend(backend, shape, cache, items, q, k, v)
    plain = attend("sdpa", shape, cache.float(), items, q.float(), k.float(), v.float())
    torch.testing.assert_close(got.float(), plain, atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("page", [16, 256])
@pytest.mark.parametrize("heads", SHAPES, ids=str)
def test_stale_contents_of_a_block_reach_no_output(heads, page, value, backend, device):
    """Neither the rest of a sequence's last block nor any other block."""
    shape, cache, items, q, k, v = spread_step(heads, 0, page, backend, device)
    left = torch.full_like(cache, value)
    for item in items:
        for first in range(0, item.end, page):
            own = (item.block_ids[first // page], ..., slice(min(page, item.end - first)), slice(None))
            left[own] = cache[own]
    for name in sorted({backend, "sdpa"}):
        clean = attend(name, shape, cache, items, q, k, v)
        assert torch.equal(attend(name, shape, left, items, q, k, v), clean), name


def spread_step(heads: tuple[int, int, int], window: int, page: int, backend: str, device: str):
    if backend == "varlen" and page not in TORCH_PAGE_SIZES:
        pytest.skip(f"torch's kernel takes no pages of {page}")
    shape = AttentionShape(*heads, page, (window,) * 2)
    torch.manual_seed(0)
    spans = [("fresh", 0, 50), ("chunk", 300, 340), ("token", 519, 520)]
    need = [-(-end // page) for _, _, end in spans]
    blocks = torch.randperm(sum(need) + 5).tolist()
    items: list[PlanItem] = []
    for (name, begin, end), count in zip(spans, need, strict=True):
        mine, blocks = blocks[:count], blocks[count:]
        items.append(PlanItem(name, [0] * (end - begin), begin, mine, len(items), 1))
    cache = torch.randn(sum(need) + 5, 2, 2, heads[1], page, heads[2]).to(device, torch.bfloat16)
    tokens = sum(len(item.token_ids) for item in items)
    q, k, v = (
        torch.randn(tokens, n, heads[2]).to(device, torch.bfloat16) for n in (heads[0], *[heads[1]] * 2)
    )
    put(cache, items, k, v, page)
    return shape, cache, items, q, k, v


def put(cache: Tensor, items: list[PlanItem], k: Tensor, v: Tensor, page: int) -> None:
    row = 0
    for item in items:
        for position in range(item.begin, item.end):
            block, offset = item.block_ids[position // page], position % page
            cache[block, :, 0, :, offset], cache[block, :, 1, :, offset] = k[row], v[row]
            row += 1


def attend(name: str, shape: AttentionShape, cache: Tensor, items, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    team = KernelTeam(1, cache.dtype, shape.head_dim) if name == "cpu" else Team(1)
    with torch.inference_mode():
        attention = registry.make(name, shape, cache, team)
        attention.begin(buffers_of(items, shape.page_size, device=str(cache.device)))
        return attention.attend(1, q, k, v)


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_in_bf16_are_as_near_to_fp32_as_those_of_plain_products(variant, backend, device, model):
    config = ModelConfig.read(model(variant))
    if backend not in registry.WITH_FEATURES and (config.attention_cap or config.family.sinks):
        pytest.skip(f"{backend} is refused for {variant}")
    ways = {"device": device, "page_size": TORCH_PAGE_SIZES[0] if backend == "varlen" else 16}
    exact = logits(model(variant), dtype="float32", attention_backend="sdpa", **ways)
    plain = logits(model(variant), dtype="bfloat16", attention_backend="sdpa", **ways)
    got = logits(model(variant), dtype="bfloat16", attention_backend=backend, **ways)
    errors, of_plain = ((one - exact).abs().mean(1) for one in (got, plain))
    if variant in EXPERTS:
        # Where two gates are nearly equal, other experts may be chosen, which changes that row's logits.
        errors, of_plain = errors.min(), of_plain.min()
    assert float(errors.mean()) <= 1.5 * float(of_plain.mean())


def logits(model, **settings) -> Tensor:
    """[6, vocab] of two sequences: both whole, then one cut and one by a token, then a token of each."""
    runner = runner_of(model, **settings)
    one, other = prompt_ids(90), prompt_ids(60, seed=1)
    steps = [(0, 50, 0, 58), (50, 89, 58, 59), (89, 90, 59, 60)]
    found, page = [], runner.page_size
    for a, b, c, d in steps:
        items = [
            PlanItem("one", one[a:b], a, [5, 2, 9, 1, 30, 7][: -(-b // page)], 0, 1),
            PlanItem("other", other[c:d], c, [6, 4, 8, 3][: -(-d // page)], 1, 1),
        ]
        found.append(runner.execute(StepPlan(items, [])).cpu())
    return torch.cat(found)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("page", [16, 256])
def test_the_backend_that_auto_chooses_runs_and_is_deterministic(page, dtype, device, model):
    ways = {"device": device, "dtype": dtype, "page_size": page}
    prompts = [prompt_ids(70), prompt_ids(33, seed=1)]
    both = generate(model("llama"), prompts, **ways)
    assert [len(answer) for answer in both] == [NEW, NEW]
    assert generate(model("llama"), prompts, **ways) == both
