"""A CUDA device without a card: tensors that compute in main memory at once, and note what a card would not forgive.

The device has index 3. Wrong uses are collected, because the ranks' threads catch exceptions: anything enqueued on the
engine's stream, anything that makes the host wait, a copy between host and device that is not asynchronous or whose host
memory is not pinned.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from kv_transfer.device.cuda import CudaCopier
from tests.kv_transfer.pair import Device

INDEX = 3
# "cuda" itself: torch without CUDA refuses to copy to it. The index travels in descriptors and grants all the same.
DEVICE = torch.device("cpu", INDEX)
WAITING = (
    "_local_scalar_dense",
    "item",
    "nonzero",
    "is_nonzero",
    "equal",
    "masked_select",
    "_unique2",
)


@dataclass(eq=False)
class Stream:
    name: str


@dataclass(eq=False)
class FakeEvent:
    cuda: FakeCuda
    stream: Stream
    ended: bool = False

    def query(self) -> bool:
        return self.ended or not self.cuda.is_held


@dataclass(eq=False)
class FakeCuda:
    is_held: bool = False  # events recorded from now on end when a test says so
    wrong: list[str] = field(default_factory=list)
    log: list[tuple[str, str]] = field(default_factory=list)  # (what, stream)
    allocated: int = 0
    pinned_bytes: int = 0
    engine_stream: Stream = field(default_factory=lambda: Stream("engine"))

    def __post_init__(self) -> None:
        self._current = threading.local()
        self._pinned: set[int] = set()
        self._bound: set[int] = set()  # threads of hand-offs

    # --- what CudaCopier uses ----------------------------------------------------------------------------

    def new_stream(self) -> Stream:
        return Stream("copies")

    def current_stream(self) -> Stream:
        found: Stream = getattr(self._current, "stream", self.engine_stream)
        return found

    @contextmanager
    def on(self, stream: Stream) -> Iterator[None]:
        before, self._current.stream = self.current_stream(), stream
        yield
        self._current.stream = before

    def use_thread(self, stream: Stream) -> None:
        self._bound.add(threading.get_ident())
        self._current.stream = stream

    def record(self, stream: Stream) -> FakeEvent:
        self.log.append(("record", stream.name))
        return FakeEvent(self, stream)

    def wait(self, stream: Stream, event: FakeEvent) -> None:
        self.log.append((f"wait for {event.stream.name}", stream.name))
        if stream is self.engine_stream:
            self.wrong.append("the engine's stream waits")

    def synchronize(self, stream: Stream) -> None:
        self.note_waiting("synchronize")

    def empty(self, size: int) -> Tensor:
        self.allocated += size
        return DeviceTensor(torch.full((size,), 0xEE, dtype=torch.uint8), self)

    def pinned(self, size: int) -> Tensor:
        self.pinned_bytes += size
        memory = torch.full((size,), 0xDD, dtype=torch.uint8)
        self._pinned.add(memory.untyped_storage().data_ptr())
        return memory

    # --- what tensors report ------------------------------------------------------------------------------

    def note_waiting(self, what: str) -> None:
        """The start of a process may wait, a hand-off's thread may not."""
        if threading.get_ident() in self._bound:
            self.wrong.append(f"{what} waits for the device")

    def ran(self, operation: str, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
        stream = self.current_stream()
        self.log.append((operation, stream.name))
        if stream is self.engine_stream:
            self.wrong.append(f"{operation} on the engine's stream")
        if operation in WAITING or (operation == "_to_copy" and options.get("device", DEVICE) != DEVICE):
            self.note_waiting(operation)
        if operation == "copy_":
            self._check_copy(*arguments, **options)

    def _check_copy(self, target: Tensor, source: Tensor, non_blocking: bool = False) -> None:
        host = [one for one in (target, source) if not isinstance(one, DeviceTensor)]
        if host and not non_blocking:
            self.wrong.append("a copy that the host waits for")
        if any(one.untyped_storage().data_ptr() not in self._pinned for one in host):
            self.wrong.append("a copy of memory that is not pinned")


class DeviceTensor(Tensor):
    """Memory of a FakeCuda; `host` is the tensor that stands for it."""

    host: Tensor
    card: FakeCuda

    @staticmethod
    def __new__(cls, host: Tensor, cuda: FakeCuda) -> DeviceTensor:
        made: DeviceTensor = Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls,
            host.size(),
            strides=host.stride(),
            storage_offset=host.storage_offset(),
            dtype=host.dtype,
            device=DEVICE,
        )
        made.host, made.card = host, cuda
        return made

    def __repr__(self) -> str:  # type: ignore[override]
        return f"DeviceTensor({list(self.shape)}, {self.dtype})"

    def data_ptr(self) -> int:
        return self.host.data_ptr()

    def numpy(self, **options: Any) -> Any:
        self.card.note_waiting("numpy")
        raise TypeError("cannot convert a tensor of a device to numpy")

    def tolist(self) -> Any:
        self.card.note_waiting("tolist")
        return self.host.tolist()

    def cpu(self, *arguments: Any, **options: Any) -> Tensor:
        self.card.note_waiting("cpu")
        return self.host.clone()

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def, override]
        kwargs = kwargs or {}
        wrappers: dict[int, DeviceTensor] = {}
        cudas: list[FakeCuda] = []

        def unwrap(one: DeviceTensor) -> Tensor:
            wrappers[id(one.host)] = one
            cudas.append(one.card)
            return one.host

        plain_args, plain_kwargs = tree_map_only(DeviceTensor, unwrap, (args, kwargs))
        if not (func.is_view or func.overloadpacket is torch.ops.aten.detach):
            cudas[0].ran(func.overloadpacket.__name__, args, kwargs)
        given = {id(one) for one in plain_args if isinstance(one, Tensor)}

        def wrap(one: Tensor) -> Tensor:
            if id(one) in wrappers:
                return wrappers[id(one)]
            return one if id(one) in given else DeviceTensor(one, cudas[0])

        return tree_map_only(Tensor, wrap, func(*plain_args, **plain_kwargs))


def fake_device(cuda: FakeCuda) -> Device:
    return Device(
        make_copier=lambda cache, part_bytes: CudaCopier(cache, part_bytes, cuda),
        place=lambda cache: DeviceTensor(cache, cuda),
    )
