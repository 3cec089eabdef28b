"""Tensors of a checkpoint by name, from one safetensors file or several; a rank reads only its share."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from cluster.errors import ModelError
from engine.layers.linear import Int8Weight, Weight


class Checkpoint:
    """Reads one tensor at a time, so that a model is never in memory twice. Each file is opened once: the header of one
    with thousands of experts takes longer to read than a tensor. Use as a context: files are mapped until its end."""

    def __init__(self, directory: Path, dtype: torch.dtype, device: torch.device, *, int8: bool = False):
        """`int8`: matrices may be stored so, beside their scales."""
        self._dtype = dtype
        self._device = device
        self._directory = directory
        self._int8 = int8
        self._files = tensor_files(directory)
        self._opened: dict[Path, Any] = {}  # by safetensors, which has no types

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, *error: object) -> None:
        self._opened.clear()

    def has(self, name: str) -> bool:
        return name in self._files

    def get(
        self,
        name: str,
        *shape: int,
        rows: slice | None = None,
        columns: slice | None = None,
        item: int | None = None,
        dtype: torch.dtype | None = None,
    ) -> torch.Tensor:
        """The tensor, or the given rows or columns of it, or of one of its items where it has three dimensions. `shape` is
        that of the whole.

        Raises ModelError naming the tensor if it is missing or has another shape.
        """
        tensor = self._read(name, shape, rows, columns, item)
        if not tensor.is_floating_point():
            raise ModelError(
                f"tensor {name} is stored as {tensor.dtype}, expected floating point", field=name
            )
        found = tensor.to(self._device, dtype or self._dtype).contiguous()
        # One tensor that stays in the file's mapping would keep all of it, and what was read there, in this process
        mapped = found.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr()
        return found.clone() if mapped else found

    def matrix(
        self, name: str, *shape: int, rows: slice | None = None, columns: slice | None = None
    ) -> Weight:
        """The weights of a product, as `get`; in the form in which they are stored."""
        scale = f"{name}_scale"
        if not self._int8 or scale not in self._files:
            return self.get(name, *shape, rows=rows, columns=columns)
        codes = self._read(name, shape, rows, columns)
        if codes.dtype is not torch.int8:
            raise ModelError(f"tensor {name} is stored as {codes.dtype}, expected int8", field=name)
        scales = self._read(scale, (shape[0], 1), rows, None)[:, 0]
        return Int8Weight(codes.to(self._device).contiguous(), scales.to(self._device, torch.float32))

    def _read(
        self,
        name: str,
        shape: tuple[int, ...],
        rows: slice | None,
        columns: slice | None,
        item: int | None = None,
    ) -> torch.Tensor:
        file = self._files.get(name)
        if file is None:
            raise ModelError(f"tensor {name} is missing from {self._directory}", field=name)
        if file not in self._opened:
            self._opened[file] = _open(file)
        part = self._opened[file].get_slice(name)
        found = tuple(part.get_shape())
        if found != shape:
            raise ModelError(f"tensor {name} has shape {found}, expected {shape}", field=name)
        matrix = (rows or slice(None),) if columns is None else (slice(None), columns)
        tensor: torch.Tensor = part[matrix if item is None else (item, *matrix)]
        return tensor


def tensor_files(directory: Path) -> dict[str, Path]:
    """Map each tensor name of a checkpoint to its file. Raises ModelError naming the file."""
    index = directory / "model.safetensors.index.json"
    if index.exists():
        try:
            names = json.loads(index.read_text())["weight_map"]
            return {name: _inside(directory, file) for name, file in names.items()}
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise ModelError(f"{index}: {error!r}", field=index.name) from error
    single = directory / "model.safetensors"
    if not single.exists():
        raise ModelError(f"{directory} has no model.safetensors and no index", field="model.safetensors")
    with _open(single) as handle:
        return dict.fromkeys(handle.keys(), single)


def _inside(directory: Path, file: str) -> Path:
    """The path of a file that an index names. Raises ValueError if it is not directly in the index's directory."""
    if Path(file).name != file:
        raise ValueError(f"{file!r} is not the name of a file in this directory")
    return directory / file


def _open(file: Path) -> safe_open:
    try:
        return safe_open(str(file), "pt")
    except Exception as error:  # safetensors raises types of its own for damaged files
        raise ModelError(f"{file}: {error}", field=file.name) from error
