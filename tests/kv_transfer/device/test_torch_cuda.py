"""What the copier calls of torch.cuda, which cannot run here: the right functions, with the right card and stream."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch

from kv_transfer.device.torch_cuda import Cuda, TorchCuda
from tests.kv_transfer.device.fake_cuda import FakeCuda

CARD = torch.device("cuda", 1)


class Stream:
    def __init__(self, device: torch.device, priority: int):
        assert device == CARD and priority < 0
        self.calls: list[tuple[str, Any]] = []

    def wait_event(self, event: object) -> None:
        self.calls.append(("wait_event", event))

    def synchronize(self) -> None:
        self.calls.append(("synchronize", None))


class Event:
    def __init__(self) -> None:
        self.recorded: list[object] = []

    def record(self, stream: object) -> None:
        self.recorded.append(stream)

    def query(self) -> bool:
        return True


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Any]]:
    noted: list[tuple[str, Any]] = []
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    for name in ("set_device", "set_stream", "current_stream", "stream"):
        monkeypatch.setattr(torch.cuda, name, lambda given, name=name: noted.append((name, given)))
    return noted


def test_a_thread_selects_the_card_and_then_its_stream(calls):
    cuda = TorchCuda(CARD)
    stream = cuda.new_stream()
    cuda.use_thread(stream)
    assert calls == [("set_device", CARD), ("set_stream", stream)]


def test_events_are_recorded_and_awaited_on_the_given_stream(calls):
    cuda = TorchCuda(CARD)
    stream = cuda.new_stream()
    event: Any = cuda.record(stream)
    assert event.recorded == [stream] and event.query()
    cuda.wait(stream, event)
    cuda.synchronize(stream)
    assert stream.calls == [("wait_event", event), ("synchronize", None)]
    cuda.current_stream()
    cuda.on(stream)
    assert calls == [("current_stream", CARD), ("stream", stream)]


def test_device_memory_is_of_the_card_and_host_memory_is_pinned(monkeypatch):
    noted: list[dict[str, Any]] = []

    def empty(size: int, **options: Any) -> int:
        noted.append(options)
        return size

    monkeypatch.setattr(torch, "empty", empty)
    cuda: Any = TorchCuda(CARD)
    assert (cuda.empty(64), cuda.pinned(32)) == (64, 32)
    assert noted == [{"dtype": torch.uint8, "device": CARD}, {"dtype": torch.uint8, "pin_memory": True}]


def test_the_real_ones_take_what_is_given_to_them():
    """By this machine's torch."""
    assert {"device", "priority"} <= set(inspect.signature(torch.cuda.Stream.__new__).parameters)
    assert "stream" in inspect.signature(torch.cuda.Event.record).parameters
    assert "event" in inspect.signature(torch.cuda.Stream.wait_event).parameters
    for name, parameter in [
        ("set_stream", "stream"),
        ("stream", "stream"),
        ("set_device", "device"),
        ("current_stream", "device"),
    ]:
        assert parameter in inspect.signature(getattr(torch.cuda, name)).parameters


def test_the_fake_card_has_the_same_interface():
    for name in (name for name in vars(Cuda) if not name.startswith("_")):
        ours = list(inspect.signature(getattr(TorchCuda, name)).parameters)
        assert list(inspect.signature(getattr(FakeCuda, name)).parameters) == ours, name
