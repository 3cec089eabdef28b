"""KV in int8 on the GPU: its codes are the CPU's, it is handed over between devices as it lies, and what it costs.

`python3 -m tests.gpu -k kv_format`
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor

from bench import limits
from bench.checkpoint import ModelShape, write_model
from bench.figures import Figure
from cluster.config.worker import EngineConfig
from engine import kv_blocks, kv_conversion
from engine.build import load_model
from engine.plan import PlanItem, StepPlan
from engine.runner import ModelRunner
from kv_transfer.device.base import REACHED
from kv_transfer.layout.conversion import Conversion
from kv_transfer.layout.geometry import gather
from kv_transfer.layout.rows import CacheRegion
from tests.harness.checkpoints import prompt_ids

pytestmark = pytest.mark.gpu
FAMILIES = ["llama", "qwen3"]
BLOCKS = [5, 2, 9, 1, 30, 7]
KV_BYTES = 64 << 20
# Eight of 32 layers of an 8B Llama: with all of them 64 contexts of 8,192 tokens in bf16 fit no card of 80 GB.
EIGHT = ModelShape(
    8, 4096, heads=32, kv_heads=8, head_dim=128, intermediate=14336, vocab=128256, context_tokens=8448
)
SMALL = ModelShape(2, 256, heads=4, kv_heads=2, head_dim=64, intermediate=512, vocab=1024, context_tokens=512)
NO_DIGEST = ""
FORMATS = ("bf16", "int8")


def runner_of(model, device: str, **settings: Any) -> ModelRunner:
    given = {"dtype": "float32", "kv_memory_bytes": KV_BYTES, "max_batch_requests": 16, **settings}
    return ModelRunner(load_model(EngineConfig(model=model, device=device, **given)))


def steps() -> Iterator[StepPlan]:
    """A prompt in two chunks, the second of which crosses blocks, and two single tokens."""
    tokens = prompt_ids(90)
    for begin, end in ((0, 50), (50, 88), (88, 89), (89, 90)):
        yield StepPlan([PlanItem("r", tokens[begin:end], begin, BLOCKS, 0, 1)], [])


def planes(cache: Tensor) -> list[Tensor]:
    """Codes and scales of the 90 tokens, [plane] [layer, K|V, head, token, …], in main memory."""
    page = cache.shape[4]
    used = torch.tensor(BLOCKS[: -(-90 // page)], device=cache.device)
    found = []
    for plane in kv_blocks.split(cache):
        own = plane[used].movedim(0, 3)  # [layer, K|V, head, block, token, …]
        found.append(own.flatten(3, 4)[:, :, :, :90].cpu())
    return found


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("variant", FAMILIES)
def test_codes_are_what_a_cpu_makes_of_the_same_numbers(variant, dtype, device, model):
    """To the last bit, of the first layer: what it writes does not depend on attention."""
    caches = []
    for kv_dtype in ("auto", "int8"):
        runner = runner_of(model(variant), device, dtype=dtype, kv_dtype=kv_dtype)
        for plan in steps():
            runner.execute(plan)
        caches.append(runner.kv_cache[: max(BLOCKS) + 1].clone())
    exact, codes = caches
    rounded = torch.zeros(codes.shape, dtype=torch.int8)
    kv_blocks.write(rounded, 0, exact.cpu())
    for expected, found in zip(planes(rounded), planes(codes), strict=True):
        assert torch.equal(found[0], expected[0])


def logits_of(runner: ModelRunner) -> Tensor:
    return torch.cat([runner.execute(plan).float().cpu().clone() for plan in steps()])


def distance(found: Tensor, expected: Tensor) -> float:
    """Root mean square, relative to that of the logits."""
    return float((found - expected).square().mean().sqrt() / expected.square().mean().sqrt())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("variant", FAMILIES)
def test_logits_are_near_the_cpus(variant, dtype, device, model):
    """In fp32 nearer than KV in int8 is to exact KV (7e-3 and more): a number that is nearly half way between two codes
    may get the other one. In bf16 as near as by plain products."""
    expected = logits_of(runner_of(model(variant), "cpu", kv_dtype="int8", attention_backend="sdpa"))
    found = logits_of(runner_of(model(variant), device, kv_dtype="int8", dtype=dtype))
    plain = logits_of(
        runner_of(model(variant), device, kv_dtype="int8", dtype=dtype, attention_backend="sdpa")
    )
    print(f"{variant}, {dtype}: {distance(found, expected):.2g}; by sdpa {distance(plain, expected):.2g}")
    most = 2e-3 if dtype == "float32" else 1.5 * distance(plain, expected)
    assert distance(found, expected) <= most


@pytest.mark.parametrize("count", [3, 4, 16])
def test_recorded_steps_are_the_plain_ones(count, device, model):
    if device != "cuda":
        pytest.skip("only CUDA records")
    ways = {"dtype": "bfloat16", "kv_dtype": "int8"}
    recorded = runner_of(model("llama"), device, **ways)
    plain = runner_of(model("llama"), device, cuda_graphs=False, **ways)
    assert recorded._graphs is not None, "the attention backend here can't be captured"
    recorded.warm_up()
    items = [PlanItem(str(row), [3 + row], row, [row], row, 1) for row in range(count)]
    start = some_cache(plain.kv_cache)
    found = []
    for runner in (plain, recorded, recorded):
        runner.kv_cache.copy_(start)
        found.append(runner.execute(StepPlan(items, [])).clone())
    assert torch.equal(found[1], found[2])
    if count in recorded._graphs.sizes:
        assert torch.equal(found[0], found[1])
        assert torch.equal(plain.kv_cache[:16], recorded.kv_cache[:16])
    torch.testing.assert_close(found[0], found[1], atol=0.1, rtol=0.05)


def some_cache(like: Tensor) -> Tensor:
    """Any codes, and scales as those of numbers of magnitude 1."""
    cache = torch.randint(-127, 128, like.shape, dtype=torch.int8, device=like.device)
    kv_blocks.split(cache)[1].uniform_(0.005, 0.02)
    return cache


PARTS = [
    CacheRegion(range(3), range(4), range(128), [4, 1, 9, 6, 0, 2, 8, 3]),  # whole blocks of a whole rank
    CacheRegion(range(1, 3), range(2, 4), range(5, 75), [7, 1, 9, 6, 0]),  # two heads, cut at both ends
    CacheRegion(range(1), range(1), range(18, 21), [5]),  # inside a block
]


def ended(work: Any) -> Any:
    while (done := work.result()) is None:
        time.sleep(0.001)
    return done


def place_on(device: str, cache: Tensor, part_bytes: int, conversion: Conversion | None = None) -> Any:
    pytest.importorskip("xxhash", reason="digests of hand-offs need it")
    from kv_transfer.device.registry import open_copier

    copier = open_copier(cache, part_bytes, conversion)
    copier.use_thread()
    return copier


@pytest.mark.parametrize("part", PARTS, ids=["whole", "cut", "inside"])
@pytest.mark.parametrize("dim", [64, 128])
def test_a_part_crosses_between_devices_as_it_lies(dim, part, device):
    """From a CPU's cache to the device's, and from there to a CPU's: codes, scales, and no other byte."""
    sent = some_cache(torch.zeros(10, 3, 2, 4, 16, dim + 2, dtype=torch.int8))
    size = len(part.tokens) * len(part.layers) * 2 * len(part.heads) * (dim + 2)
    wire = torch.empty(size, dtype=torch.int8)
    gather(sent, wire, part)
    there = torch.zeros(sent.shape, dtype=torch.int8, device=device)
    expected = torch.zeros_like(sent)
    place_on("cpu", expected, size).scatter(wire.view(torch.uint8), part, REACHED)
    finished(device)
    with own_thread_stream(device):
        copier = place_on(device, there, 1 << 20)
        slot = copier.allocate(1 << 20)[:size]
        assert copier.fill(slot, wire.numpy().tobytes())
        ended(copier.scatter(slot, part, REACHED))
        assert torch.equal(there.cpu(), expected)
        back = copier.allocate(1 << 20)[:size]
        read = ended(copier.read(part, back, NO_DIGEST, REACHED, to_host=True))
        assert torch.equal(torch.cat(list(read.pieces)).view(torch.int8).cpu(), wire)
        read.release()


def own_thread_stream(device: str) -> AbstractContextManager[Any]:
    """What a copier makes current on its thread is taken back at the end."""
    return torch.cuda.stream(torch.cuda.current_stream()) if device == "cuda" else nullcontext()


@pytest.mark.parametrize("part", PARTS, ids=["whole", "cut", "inside"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_part_in_bf16_is_converted_as_a_cpu_converts_it(dtype, part, device):
    """In one launch, to the last bit, also of what is not finite or half way between codes."""
    dim, shape = 128, (10, 3, 2, 4, 16, 130)
    numbers = torch.randn(len(part.tokens) * len(part.layers) * 2 * len(part.heads), dim)
    numbers *= torch.logspace(-20, 20, len(numbers))[:, None]
    numbers[1], numbers[2, 5], numbers[3] = 0.0, float("inf"), torch.arange(dim) - 62.5
    numbers[3, 0] = 127.0
    wire = numbers.to(dtype).view(torch.uint8).flatten()
    expected, there = (torch.zeros(shape, dtype=torch.int8, device=one) for one in ("cpu", device))
    by_torch = Conversion(dtype, dim, kv_blocks.write_part)
    place_on("cpu", expected, wire.numel(), by_torch).scatter(wire, part, REACHED)
    write = kv_conversion.writer(there, dtype)
    assert write is not kv_blocks.write_part, "the kernel does not run, or gives other codes"
    finished(device)
    with own_thread_stream(device):
        copier = place_on(device, there, 4 << 20, Conversion(dtype, dim, write))
        slot = copier.allocate(4 << 20)[: wire.numel()]
        assert copier.fill(slot, wire.numpy().tobytes())
        ended(copier.scatter(slot, part, REACHED))
    codes, scales = kv_blocks.split(there.cpu())
    own_codes, own_scales = kv_blocks.split(expected)
    assert torch.equal(scales.isnan(), own_scales.isnan()) and int(scales.isnan().sum()) == 1
    sound = ~scales.isnan()
    assert torch.equal(codes[sound], own_codes[sound]) and torch.equal(scales[sound], own_scales[sound])


def test_figures(device, tmp_path, show):
    card = device == "cuda"
    shape, context, batches = (EIGHT, 8192, (16, 64)) if card else (SMALL, 200, (2, 4))
    path = write_model(tmp_path, shape, device=device)
    read = limits.read_rate(3, device)
    figures = [Figure("memory read", read / 1e9, "GB/s")]
    seconds: dict[tuple[str, int], float] = {}
    tokens: dict[str, int] = {}
    for kv_dtype in FORMATS:
        sized = {} if card else {"kv_memory_bytes": 8 << 20}
        free_memory(device)
        config = EngineConfig(
            model=path, device=device, dtype="bfloat16", kv_dtype=kv_dtype, max_batch_requests=64, threads=1,
            **sized,
        )  # fmt: skip
        runner = ModelRunner(load_model(config))
        runner.warm_up()
        fill(runner.kv_cache)
        tokens[kv_dtype] = runner.num_blocks * runner.page_size
        for batch in batches:
            seconds[kv_dtype, batch] = step_seconds(runner, batch, context)
            row = shape.head_dim + 2 if kv_dtype == "int8" else 2 * shape.head_dim
            moved_bytes = batch * context * shape.layers * 2 * shape.kv_heads * row
            moved_bytes += shape.decode_weight_bytes
            figures.append(
                Figure(
                    f"{kv_dtype}, batch {batch} at {context} tokens",
                    moved_bytes / seconds[kv_dtype, batch] / read,
                    note=f"of the bandwidth; {seconds[kv_dtype, batch] * 1e3:.3g} ms a step",
                )
            )
        backend = runner.config.attention_backend
        del runner
    figures += compared(seconds, tokens, batches)
    figures.append(conversion_figure(device, shape))
    show(f"KV in int8 beside bf16: {backend}, {shape.layers} layers of {shape.hidden}", figures)


def fill(cache: Tensor) -> None:
    """Numbers as a model's: of zeros a card takes less power, and runs faster."""
    if not kv_blocks.is_quantized(cache):
        cache.uniform_(-1.0, 1.0)
        return
    cache.random_(-127, 128)
    kv_blocks.split(cache)[1].fill_(0.01)


def step_seconds(runner: ModelRunner, batch: int, context: int) -> float:
    """Of a decode step, launched one after the other: median of three runs. The host's part is hidden where it is
    shorter."""
    page = runner.page_size
    each = -(-context // page)
    blocks = torch.randperm(min(runner.num_blocks, batch * each)).tolist()
    items = []
    for row in range(batch):
        own = [blocks[(row * each + at) % len(blocks)] for at in range(each)]
        items.append(PlanItem(f"{row}", [7 + row], context - 1, own, row, 1))
    runner.execute(StepPlan(items, []))
    known = [
        PlanItem(one.request_id, one.token_ids, one.begin, one.block_ids, one.row, 1, blocks_in_row=each)
        for one in items
    ]
    plan, found = StepPlan(known, []), []
    for _ in range(3):
        finished(runner.device.type)
        began = time.perf_counter()
        for _ in range(10):
            runner.execute(plan)
        finished(runner.device.type)
        found.append((time.perf_counter() - began) / 10)
    return sorted(found)[1]


def finished(device: str) -> None:
    if device != "cpu":
        torch.cuda.synchronize()


def free_memory(device: str) -> None:
    """Recordings lie in cycles, and what the allocator keeps counts as used."""
    gc.collect()
    if device != "cpu":
        torch.cuda.empty_cache()


def compared(
    seconds: dict[tuple[str, int], float], tokens: dict[str, int], batches: Sequence[int]
) -> Iterator[Figure]:
    for batch in batches:
        ratio = seconds["bf16", batch] / seconds["int8", batch]
        yield Figure(f"bf16 ÷ int8, batch {batch}", ratio, note="time of a step")
    ratio = tokens["int8"] / tokens["bf16"]
    yield Figure("KV capacity, int8 ÷ bf16", ratio, note=f"{tokens['bf16']} and {tokens['int8']} tokens")


def conversion_figure(device: str, shape: ModelShape) -> Figure:
    """A part of 2,048 tokens in bf16, over and over."""
    layers, page, blocks = shape.layers, 16, 128 if device == "cuda" else 4
    cache = torch.zeros(
        blocks, layers, 2, shape.kv_heads, page, shape.head_dim + 2, dtype=torch.int8, device=device
    )
    write = kv_conversion.writer(cache, torch.bfloat16)
    numbers = torch.randn(blocks * layers * 2 * shape.kv_heads * page * shape.head_dim, device=device)
    numbers, ids = numbers.bfloat16(), torch.randperm(blocks).to(device)

    def ten() -> None:
        for _ in range(10):
            write(cache, numbers, ids, 0)

    timed = limits.timed(ten, device)
    median = statistics.median(timed() for _ in range(3))
    return Figure("conversion of parts", 10 * numbers.nbytes / median / 1e9, "GB/s", note="of bf16")
