"""The memory that the KV pool leaves to hand-offs is what their ranks allocate at most."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from cluster.config.worker import EngineConfig, TransferConfig, WorkerConfig
from cluster.errors import ConfigError
from engine import build
from kv_transfer import messages as m
from kv_transfer.decode_side.receiver_rank import ReceiverRank
from kv_transfer.device import cuda, sum64
from kv_transfer.device.registry import device_bytes, pinned_bytes
from kv_transfer.memory import first_slots, most_slots
from kv_transfer.prefill_side.sender_rank import SenderRank
from kv_transfer.transports.registry import Endpoints
from tests.engine.fake_memory import FakeMemory
from tests.harness.waiting import wait_for
from tests.kv_transfer.device.fake_cuda import FakeCuda, fake_device
from worker.ranks import local

MIB = 1 << 20
CONFIGS = {
    "defaults": {"staging_bytes": 8 * MIB, "ring_bytes": 16 * MIB, "ring_max_bytes": 24 * MIB},
    "staging below two slots": {"staging_bytes": MIB},
    "a ring below four slots": {"ring_bytes": MIB, "ring_max_bytes": 2 * MIB},
    "a ring that may not grow": {"ring_bytes": 24 * MIB, "ring_max_bytes": 0},
}


@pytest.fixture(params=CONFIGS, ids=str)
def transfer(request: pytest.FixtureRequest) -> TransferConfig:
    sizes: dict[str, Any] = {"slot_bytes": MIB, "ring_bytes": 8 * MIB, "ring_max_bytes": 8 * MIB}
    return TransferConfig(transport="grpc", **{**sizes, **CONFIGS[request.param]})


@pytest.fixture
def no_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sum64, "kernel", lambda: None)


def rank_of(make: Callable[..., Any], transfer: TransferConfig, fake: FakeCuda, **more: Any) -> Any:
    """Of a cache with the shortest rows that are counted."""
    dim = cuda.MIN_ROW_BYTES // 16 // 4
    device = fake_device(fake)
    return make(
        rank=0,
        kv_cache=device.place(torch.zeros(4, 2, 2, 2, 16, dim)),
        kv_head_range=(0, 2),
        endpoints=Endpoints(),
        config=transfer,
        make_copier=device.make_copier,
        **more,
    )


@pytest.mark.usefixtures("no_kernel")
def test_a_sending_rank_allocates_no_more_than_is_left_to_it(transfer):
    fake = FakeCuda()
    rank = rank_of(SenderRank, transfer, fake)
    assert 0.9 * device_bytes("prefill", transfer, on_cuda=False) <= fake.allocated
    assert fake.allocated <= device_bytes("prefill", transfer, on_cuda=True)
    assert device_bytes("prefill", transfer, on_cuda=False) == rank._source._staging.size
    assert 0 < fake.pinned_bytes <= pinned_bytes("prefill", transfer) <= 2 * fake.pinned_bytes


@pytest.mark.usefixtures("no_kernel")
def test_a_receiving_rank_whose_ring_has_grown(transfer):
    fake = FakeCuda()
    rank = rank_of(ReceiverRank, transfer, fake, decode_epoch=1)
    events: list[object] = []
    rank.start(events.append)
    if more := most_slots(transfer) - first_slots(transfer):
        rank.handle(m.AddSegment(more))
        wait_for(lambda: events, 30, "grown")
    rank.close()
    ring = most_slots(transfer) * transfer.slot_bytes
    assert ring == device_bytes("decode", transfer, on_cuda=False)
    assert ring < fake.allocated <= device_bytes("decode", transfer, on_cuda=True)
    assert 0 < fake.pinned_bytes <= pinned_bytes("decode", transfer) <= 2 * fake.pinned_bytes


def test_the_kernel_needs_no_memory_for_its_sums(monkeypatch):
    monkeypatch.setattr(sum64, "kernel", lambda: None)
    without = cuda.device_bytes(MIB)
    monkeypatch.setattr(sum64, "kernel", lambda: sum64.torch_sums)
    assert without - cuda.device_bytes(MIB) == 3 * MIB


@pytest.mark.parametrize(("name", "rank", "card"), [("cuda", 3, 1), ("auto", 0, 0), ("cuda:1", 0, 1)])
def test_a_rank_selects_its_card_before_anything_is_allocated(monkeypatch, name, rank, card):
    """Two cards; the rest of loading is not of interest."""
    selected: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", selected.append)
    loaded = object()

    def load(*arguments: object, handoff_bytes: int, draft_bytes: int, tell: object) -> object:
        assert selected == [torch.device("cuda", card)] and handoff_bytes
        return loaded

    monkeypatch.setattr(build, "load_model", load)
    engine = EngineConfig(model="/m", device=name)  # type: ignore[arg-type]
    config = WorkerConfig(role="decode", engine=engine)
    assert local.load(config, rank, "") is loaded


@pytest.mark.parametrize(
    ("name", "expected"), [("cuda", True), ("cuda:1", True), ("cpu", False), ("auto", False)]
)
def test_a_single_card_is_cuda_too(name, expected):
    assert local.uses_cuda(EngineConfig(model="/m", device=name)) is expected  # type: ignore[arg-type]


@pytest.mark.parametrize(("role", "setting"), [("prefill", "staging_bytes"), ("decode", "slot_bytes")])
def test_a_host_without_room_for_pinned_buffers_is_refused(role, setting):
    """The one thing of a rank on a card that lies in its container's memory for good."""
    engine = EngineConfig(model="/m", device="cuda", tensor_parallel=4, nodes=2)  # type: ignore[arg-type]
    config = WorkerConfig(role=role, engine=engine)
    needed = 2 * pinned_bytes(role, config.transfer)
    local.check_pinned(config, FakeMemory(needed, is_host=True))
    with pytest.raises(ConfigError, match=f"{needed} bytes of main memory, {needed - 1} are free") as caught:
        local.check_pinned(config, FakeMemory(needed, 1, is_host=True))
    assert caught.value.field == setting
