"""The header of a safetensors file, checked before any number is read, so that a file can be read once and in parts."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

LENGTH_BYTES = 8  # of the header, little-endian
_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


class StoredTensor(NamedTuple):
    name: str
    dtype: str  # as the file names it
    shape: tuple[int, ...]
    size: int  # bytes

    @property
    def torch_dtype(self) -> torch.dtype | None:
        """None for those that adapters do not have."""
        return _DTYPES.get(self.dtype)


def parse(header: bytes, content_bytes: int) -> Sequence[StoredTensor]:
    """The tensors in the order of their bytes, which fill `content_bytes` without gaps. Raises ValueError."""
    try:
        raw = json.loads(header, object_pairs_hook=_unique)
    except RecursionError:
        raise ValueError("the header is nested too deeply") from None
    if not isinstance(raw, dict):
        raise ValueError("the header is not an object")
    raw.pop("__metadata__", None)
    found = sorted(
        (_tensor(name, entry) for name, entry in raw.items()), key=lambda one: (one[0], one[1].size)
    )
    end = 0
    for begin, tensor in found:
        if begin != end:
            raise ValueError(f"tensor {tensor.name[:200]} begins at byte {begin}, not at {end}")
        end += tensor.size
    if end != content_bytes:
        raise ValueError(f"its tensors have {end} bytes, the file has {content_bytes}")
    return [tensor for _, tensor in found]


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) != len(pairs):
        raise ValueError("the header has a key twice")
    return made


def _tensor(name: str, entry: Any) -> tuple[int, StoredTensor]:
    """The tensor of an entry, and the place of its first byte."""
    known: dict[str, Any] = entry if isinstance(entry, dict) else {}
    stored: Any = known.get("dtype")
    shape: Any = known.get("shape")
    offsets: Any = known.get("data_offsets")
    if type(stored) is not str or not _are_sizes(shape) or not _are_sizes(offsets) or len(offsets) != 2:
        raise ValueError(f"tensor {name[:200]} has no dtype, shape and data_offsets")
    tensor = StoredTensor(name, stored[:16], tuple(shape), offsets[1] - offsets[0])
    dtype = tensor.torch_dtype
    if tensor.size < 0 or (dtype is not None and tensor.size != _numbers(tensor.shape) * dtype.itemsize):
        raise ValueError(f"tensor {name[:200]} has {tensor.size} bytes, not those of its shape")
    return offsets[0], tensor


def _are_sizes(found: Any) -> bool:
    return (
        isinstance(found, list) and len(found) <= 8 and all(type(n) is int and 0 <= n < 2**48 for n in found)
    )


def _numbers(shape: tuple[int, ...]) -> int:
    count = 1
    for size in shape:
        count *= size
    return count
