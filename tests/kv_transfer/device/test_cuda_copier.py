"""Parts on a device of which no card is at hand: the bytes of every part, the stream of every operation, the bounds."""

from __future__ import annotations

import secrets
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.protocol.kv_format import SCALE_BYTES
from engine import kv_blocks
from kv_transfer.device import cuda as cuda_copier
from kv_transfer.device import registry, sum64
from kv_transfer.device.base import REACHED, PartCopier
from kv_transfer.device.cpu import CpuCopier
from kv_transfer.device.cuda import HOST_PARTS, WORKS, CudaCopier, EventMark
from kv_transfer.layout.conversion import Conversion
from kv_transfer.layout.digest import NONE, SUM64, digest
from kv_transfer.layout.geometry import gather
from kv_transfer.layout.rows import CacheRegion
from tests.kv_transfer.device.fake_cuda import DeviceTensor, FakeCuda

BLOCKS, LAYERS, HEADS, PAGE, DIM = 12, 3, 6, 4, 8
PART_BYTES = 1 << 16
DTYPES = (torch.float32, torch.bfloat16, torch.int8)
WHOLE = CacheRegion(range(LAYERS), range(HEADS), range(2 * PAGE), [7, 2])


@pytest.fixture(autouse=True)
def no_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton's has a test of its own (test_sum64.py)."""
    monkeypatch.setattr(sum64, "kernel", lambda: None)


def cache(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    if dtype is torch.int8:
        size = (BLOCKS, LAYERS, 2, HEADS, PAGE, DIM + SCALE_BYTES)
        return torch.randint(-128, 128, size, generator=generator).to(dtype)
    return torch.randn(BLOCKS, LAYERS, 2, HEADS, PAGE, DIM, generator=generator).to(dtype)


class Rig:
    """A copier of a fake device, on its thread."""

    def __init__(self, host: torch.Tensor | None = None, part_bytes: int = PART_BYTES):
        self.host = cache() if host is None else host
        self.cuda = FakeCuda()
        self.copier = CudaCopier(DeviceTensor(self.host, self.cuda), part_bytes, self.cuda)
        memory = self.copier.allocate(part_bytes)
        assert isinstance(memory, DeviceTensor)
        self.memory: DeviceTensor = memory
        self.copier.use_thread()
        self.cuda.log.clear()

    def expected(self, region: CacheRegion) -> torch.Tensor:
        token = len(region.layers) * 2 * len(region.heads) * self.host.shape[5]
        part = torch.empty(token * len(region.tokens), dtype=self.host.dtype)
        gather(self.host, part, region)
        return part.view(torch.uint8)


@st.composite
def regions(draw: st.DrawFn) -> CacheRegion:
    first, last = sorted(draw(st.lists(st.integers(0, LAYERS), min_size=2, max_size=2, unique=True)))
    heads = sorted(draw(st.lists(st.integers(0, HEADS), min_size=2, max_size=2, unique=True)))
    begin = draw(st.integers(0, 20))
    end = begin + draw(st.integers(1, 6 * PAGE))
    count = -(-end // PAGE) - begin // PAGE
    blocks = draw(st.permutations(range(BLOCKS)))[:count]
    return CacheRegion(range(first, last), range(*heads), range(begin, end), list(blocks))


@settings(max_examples=150, deadline=None)
@given(region=regions(), dtype=st.sampled_from(DTYPES), to_host=st.booleans())
def test_a_part_is_read_as_the_cpu_reads_it(region, dtype, to_host):
    rig = Rig(cache(dtype))
    expected = rig.expected(region)
    into = rig.memory[: expected.numel()]
    reading = rig.copier.read(region, into, SUM64, REACHED, to_host=to_host)
    assert reading is not None
    read = reading.result()
    assert read is not None
    (piece,) = read.pieces
    assert isinstance(piece, DeviceTensor) is not to_host
    assert torch.equal(piece.host if isinstance(piece, DeviceTensor) else piece, expected)
    assert read.digest == digest([expected], SUM64)
    launches = [what for what, _ in rig.cuda.log if what in ("index_select", "index_copy_")]
    assert len(launches) <= 1, "one launch for all whole blocks"
    assert not rig.cuda.wrong


@settings(max_examples=150, deadline=None)
@given(region=regions(), dtype=st.sampled_from(DTYPES))
def test_a_part_is_scattered_where_the_cpu_scatters_it(region, dtype):
    rig, there = Rig(torch.zeros_like(cache(dtype))), cache(dtype)
    size = rig.expected(region).numel()
    part = torch.empty(size // there.element_size(), dtype=dtype)
    gather(there, part, region)
    rig.memory.host[:size] = part.view(torch.uint8)
    scattering = rig.copier.scatter(rig.memory[:size], region, REACHED)
    assert scattering is not None and scattering.result()
    expected = torch.zeros_like(rig.host)
    CpuCopier(expected).scatter(part.view(torch.uint8), region, REACHED)
    assert torch.equal(rig.host, expected), "a byte of another region was written, or one is missing"
    assert sum(what == "index_copy_" for what, _ in rig.cuda.log) <= 1
    assert not rig.cuda.wrong


@settings(max_examples=50, deadline=None)
@given(region=regions())
def test_a_part_is_converted_without_waiting(region):
    """As a CPU does it, on the copier's stream."""
    conversion = Conversion(torch.float32, DIM, kv_blocks.write_part)
    there, cuda = cache(), FakeCuda()
    host = torch.zeros_like(cache(torch.int8))
    copier = CudaCopier(DeviceTensor(host, cuda), PART_BYTES, cuda, conversion)
    memory = copier.allocate(PART_BYTES)
    copier.use_thread()
    cuda.log.clear()
    part = torch.empty(len(region.tokens) * len(region.layers) * 2 * len(region.heads) * DIM)
    gather(there, part, region)
    size = 4 * part.numel()
    memory.host[:size] = part.view(torch.uint8)  # type: ignore[attr-defined]
    scattering = copier.scatter(memory[:size], region, REACHED)
    assert scattering is not None and scattering.result() and not cuda.wrong
    expected = torch.zeros_like(host)
    CpuCopier(expected, conversion).scatter(part.view(torch.uint8), region, REACHED)
    assert torch.equal(host, expected)


@pytest.mark.parametrize("ids", [[-1, 2], [3, BLOCKS]])
def test_a_block_that_does_not_exist_is_found_before_the_device_sees_it(ids):
    rig = Rig()
    region = CacheRegion(range(LAYERS), range(HEADS), range(2 * PAGE), ids)
    size = rig.expected(WHOLE).numel()
    for _ in range(2 * WORKS):  # and costs no buffer
        with pytest.raises(IndexError, match="blocks"):
            rig.copier.read(region, rig.memory[:size], SUM64, REACHED, to_host=False)
        with pytest.raises(IndexError, match="blocks"):
            rig.copier.scatter(rig.memory[:size], region, REACHED)
    assert not rig.cuda.log


def test_a_part_is_read_on_a_stream_of_its_own_after_the_engines_mark():
    rig = Rig()
    with rig.cuda.on(rig.cuda.engine_stream):  # as on the engine's thread
        mark = rig.copier.mark()
    into = rig.memory[: rig.expected(WHOLE).numel()]
    rig.copier.read(WHOLE, into, SUM64, mark, to_host=True)
    whats = [what for what, stream in rig.cuda.log if stream == "copies"]
    assert ("record", "engine") in rig.cuda.log
    assert whats.index("wait for engine") < whats.index("index_select") < whats.index("record")
    assert whats.count("copy_") == 3, "row numbers to the device; sums and bytes to the host"
    assert {stream for what, stream in rig.cuda.log if what != "record"} == {"copies"}


def test_scattering_waits_for_the_mark_of_its_reservation():
    """On the hand-off's own thread a mark is one of the engine's stream all the same."""
    rig = Rig()
    reserved = rig.copier.mark()
    assert rig.cuda.log == [("record", "engine")]
    rig.copier.scatter(rig.memory[: rig.expected(WHOLE).numel()], WHOLE, reserved)
    whats = [what for what, stream in rig.cuda.log if stream == "copies"]
    assert whats.index("wait for engine") < whats.index("index_copy_") < whats.index("record")


def test_nothing_has_a_result_before_its_event():
    rig = Rig()
    size = rig.expected(WHOLE).numel()
    rig.cuda.is_held = True
    with rig.cuda.on(rig.cuda.engine_stream):
        mark = rig.copier.mark()
    work = [
        mark,
        rig.copier.enqueued(),
        rig.copier.read(WHOLE, rig.memory[:size], SUM64, mark, to_host=False),
        rig.copier.digest(rig.memory[:size], SUM64),
        rig.copier.scatter(rig.memory[:size], WHOLE, REACHED),
    ]
    assert [one.result() for one in work if one is not None] == [None] * 5
    rig.cuda.is_held = False
    assert all(one is not None and one.result() for one in work)


def test_works_in_progress_are_bounded_and_their_buffers_come_back():
    rig = Rig()
    data = rig.memory[:1024]
    rig.cuda.is_held = True
    works = [rig.copier.digest(data, SUM64) for _ in range(WORKS)]
    assert None not in works
    assert rig.copier.digest(data, SUM64) is None
    assert rig.copier.scatter(data, WHOLE, REACHED) is None
    assert (
        rig.copier.read(WHOLE, rig.memory[: rig.expected(WHOLE).numel()], NONE, REACHED, to_host=True) is None
    )
    assert rig.copier.digest(data, NONE) is not None, "nothing to compute"
    rig.cuda.is_held = False
    for _ in range(2):  # the second result costs nothing
        assert all(one is not None and one.result() for one in works)
    again = [rig.copier.digest(data, SUM64) for _ in range(WORKS)]
    assert None not in again and rig.copier.digest(data, SUM64) is None


def test_parts_through_main_memory_are_bounded():
    rig = Rig()
    into, size = rig.memory, rig.expected(WHOLE).numel()
    rig.cuda.is_held = True
    payload = secrets.token_bytes(512)
    assert all(rig.copier.fill(into[:1024], payload) for _ in range(HOST_PARTS))
    assert not rig.copier.fill(into, payload), "their memory is still read"
    assert rig.copier.read(WHOLE, into[:size], SUM64, REACHED, to_host=True) is None
    rig.cuda.is_held = False
    assert bytes(rig.memory.host[:512].tolist()) == payload
    assert rig.copier.fill(into, payload)
    readings = [rig.copier.read(WHOLE, into[:size], SUM64, REACHED, to_host=True) for _ in range(HOST_PARTS)]
    assert None not in readings
    reads = [one.result() for one in readings if one is not None]
    assert not rig.copier.fill(into, payload), "read, and not fetched by the transport"
    for read in reads:
        assert read is not None
        read.release()
        assert rig.copier.fill(into, payload)
    assert not rig.cuda.wrong


def test_the_buffers_of_work_that_could_not_be_enqueued_come_back_after_its_event(monkeypatch):
    rig = Rig()
    size = rig.expected(WHOLE).numel()

    def fails(*arguments: object) -> None:
        raise RuntimeError("no memory on the device")

    monkeypatch.setattr(rig.copier, "_sum", fails)
    rig.cuda.is_held = True
    for _ in range(HOST_PARTS):
        with pytest.raises(RuntimeError, match="no memory"):
            rig.copier.read(WHOLE, rig.memory[:size], SUM64, REACHED, to_host=True)
    assert rig.copier.read(WHOLE, rig.memory[:size], SUM64, REACHED, to_host=True) is None
    rig.cuda.is_held = False
    with pytest.raises(RuntimeError, match="no memory"):
        rig.copier.read(WHOLE, rig.memory[:size], SUM64, REACHED, to_host=True)


def test_a_part_is_never_read_where_it_lies():
    copier: PartCopier = Rig().copier
    assert copier.pieces(WHOLE, 1) is None


def test_a_wrong_use_is_noticed():
    """What the other tests rely on."""
    rig = Rig()
    uses: dict[str, Callable[[], object]] = {
        "on the engine's stream": rig.memory.zero_,
        "_local_scalar_dense": lambda: rig.memory.view(torch.int32).sum().item(),
        "numpy": rig.memory.numpy,
        "the host waits": lambda: rig.memory[:8].copy_(rig.cuda.pinned(8)),
        "not pinned": lambda: rig.memory[:8].copy_(torch.zeros(8, dtype=torch.uint8), non_blocking=True),
        "synchronize": lambda: rig.cuda.synchronize(rig.cuda.current_stream()),
    }
    for name, use in uses.items():
        rig.cuda.wrong.clear()
        with rig.cuda.on(rig.cuda.engine_stream if "stream" in name else rig.cuda.current_stream()):
            try:
                use()
            except TypeError:
                assert name == "numpy"
        assert any(name in wrong for wrong in rig.cuda.wrong), name


def test_a_kernel_that_does_not_run_leaves_the_sums_to_torch(monkeypatch, caplog):
    def fails(words: torch.Tensor, sums: torch.Tensor) -> None:
        raise RuntimeError("no C compiler")

    monkeypatch.setattr(sum64, "kernel", lambda: fails)
    rig = Rig()
    assert "the kernel does not run" in caplog.text
    summed = rig.copier.digest(rig.memory[:4096], SUM64)
    assert summed is not None and summed.result() == digest([rig.memory.host[:4096]], SUM64)


def test_marks_are_events():
    """The copier's stream waits for no other kind of mark, such as a CPU's."""
    assert isinstance(Rig().copier.mark(), EventMark)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("part_bytes", [64 << 10, 4 << 20])
def test_a_copier_takes_no_more_memory_than_it_is_counted_for(part_bytes, dtype):
    """A cache whose rows are the shortest that are counted."""
    dim = cuda_copier.MIN_ROW_BYTES // dtype.itemsize // PAGE
    host = torch.zeros(4, LAYERS, 2, HEADS, PAGE, dim, dtype=dtype)
    cuda = FakeCuda()
    copier = CudaCopier(DeviceTensor(host, cuda), part_bytes, cuda)
    assert 0 < cuda.allocated <= cuda_copier.device_bytes(part_bytes)
    assert cuda.pinned_bytes <= cuda_copier.device_bytes(part_bytes) + HOST_PARTS * part_bytes
    assert registry.open_copier(host, part_bytes).digest_kinds != copier.digest_kinds
