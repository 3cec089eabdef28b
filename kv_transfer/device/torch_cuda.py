"""The part of torch.cuda that a part copier uses."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import Tensor


class Event(Protocol):
    def query(self) -> bool: ...


class Cuda(Protocol):
    """Streams, events and memory of one device. Tests give one of their own, because they have no card."""

    def new_stream(self) -> Any: ...

    def current_stream(self) -> Any: ...

    def on(self, stream: Any) -> AbstractContextManager[Any]: ...

    def use_thread(self, stream: Any) -> None:
        """Make the device and the stream current on the calling thread."""

    def record(self, stream: Any) -> Event: ...

    def wait(self, stream: Any, event: Any) -> None:
        """Let work that is enqueued in `stream` from now on begin after `event`. The host does not wait."""

    def synchronize(self, stream: Any) -> None: ...

    def empty(self, size: int) -> Tensor:
        """uint8 [size] of the device."""

    def pinned(self, size: int) -> Tensor:
        """uint8 [size] of main memory that the device copies from and to by itself."""


class TorchCuda:
    def __init__(self, device: torch.device):
        self._device = device

    def new_stream(self) -> Any:
        # High priority: copies of some microseconds are not queued behind a step's large kernels.
        return torch.cuda.Stream(self._device, priority=-1)  # type: ignore[no-untyped-call]

    def current_stream(self) -> Any:
        return torch.cuda.current_stream(self._device)

    def on(self, stream: Any) -> AbstractContextManager[Any]:
        return torch.cuda.stream(stream)

    def use_thread(self, stream: Any) -> None:
        torch.cuda.set_device(self._device)
        torch.cuda.set_stream(stream)

    def record(self, stream: Any) -> Event:
        event: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(stream)
        recorded: Event = event
        return recorded

    def wait(self, stream: Any, event: Any) -> None:
        stream.wait_event(event)

    def synchronize(self, stream: Any) -> None:
        stream.synchronize()

    def empty(self, size: int) -> Tensor:
        return torch.empty(size, dtype=torch.uint8, device=self._device)

    def pinned(self, size: int) -> Tensor:
        return torch.empty(size, dtype=torch.uint8, pin_memory=True)
