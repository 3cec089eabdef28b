"""Tensors of a checkpoint by name, from one safetensors file or several; a rank reads only its share."""

from __future__ import annotations

import json
import os
from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from cluster.errors import ModelError
from cluster.protocol import model_limits
from engine.layers.linear import Int8Weight, Weight
from engine.quant import stored
from engine.quant.formats import INT8, StoredFormat


class Checkpoint:
    """Reads one tensor at a time, so that a model is never in memory twice. Each file is opened once: the header of one
    with thousands of experts takes longer to read than a tensor. Use as a context: files are mapped until its end."""

    def __init__(
        self,
        directory: Path,
        dtype: torch.dtype,
        device: torch.device,
        *,
        quantization: StoredFormat | None = None,
        kinds: Collection[str] = (),
    ):
        """`quantization`: the format of matrices, None if they are plain (`formats.of_matrices`). `kinds`: those of codes
        that kernels read: they are kept."""
        self._dtype = dtype
        self._device = device
        self._directory = directory
        self._quantization, self._kinds = quantization, kinds
        self._files = tensor_files(directory)
        self._opened: dict[Path, Any] = {}  # by safetensors, which has no types

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, *error: object) -> None:
        self._opened.clear()

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
        matrix = (rows or slice(None), columns or slice(None))
        tensor = self.part(name, shape, *(matrix if item is None else (item, *matrix)))
        stored.expect_plain(name, tensor)
        return self._own(tensor, dtype or self._dtype)

    def head(self, name: str, *shape: int, rows: slice) -> Weight:
        """The output head: as `matrix`, but not rounded while it is loaded."""
        if self._quantization is not None and self._quantization.rounded:
            return self.get(name, *shape, rows=rows)
        return self.matrix(name, *shape, rows=rows)

    def matrix(
        self, name: str, *shape: int, rows: slice | None = None, columns: slice | None = None
    ) -> Weight:
        """The weights of a product, as `get`: int8 where they are stored so, codes if these are kept, else in the engine's
        dtype."""
        outputs, inputs = shape
        product, how = name.removesuffix(".weight"), self._quantization
        if how is None or not stored.is_stored(how, self, product):
            return self.get(name, *shape, rows=rows, columns=columns)
        share = stored.Matrix(
            product, outputs, inputs, rows or slice(0, outputs), columns or slice(0, inputs)
        )
        if how.name != INT8:
            kept = stored.read_coded(how, self, share, self._kinds) if self._kinds else None
            if kept is not None:
                return kept.each(lambda one: one.to(self._device))
            return stored.read(how, self, share, self._dtype).to(self._device)
        codes, scales = stored.read_int8(self, share)
        return Int8Weight(self._own(codes, torch.int8), self._own(scales, torch.float32))

    def expert(
        self,
        name: str,
        count: int,
        outputs: int,
        inputs: int,
        *,
        item: int,
        rows: slice | None = None,
        columns: slice | None = None,
    ) -> torch.Tensor:
        """The matrix [outputs, inputs] of expert `item`, or rows or columns of it, from the tensor `name` [count, inputs,
        outputs] of all experts, or from their form in MXFP4 (`stored.read_expert`).

        Raises ModelError naming the tensor if it is missing or has another shape or type.
        """
        if self._quantization is None or not self.has(f"{name}_blocks"):
            return (
                self.get(name, count, inputs, outputs, item=item, rows=columns, columns=rows).t().contiguous()
            )
        share = stored.Matrix(name, outputs, inputs, rows or slice(0, outputs), columns or slice(0, inputs))
        return stored.read_expert(self, share, item, count, self._dtype).to(self._device)

    def has(self, name: str) -> bool:
        return name in self._files

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._slice(name).get_shape())

    def part(self, name: str, shape: tuple[int, ...], *parts: slice | int, why: str = "") -> torch.Tensor:
        """The tensor as it is stored, or `parts` of it by dimension; it may be in the file's mapping. `why`: what implies
        its shape.

        Raises ModelError naming the tensor if it is missing, has another shape or cannot be read.
        """
        part = self._slice(name)
        found = tuple(part.get_shape())
        if found != shape:
            because = f" for {why}" if why else ""
            raise ModelError(f"tensor {name} has shape {found}, expected {shape}{because}", field=name)
        try:
            tensor: torch.Tensor = (
                part[parts[: len(shape)] or (slice(None),)] if shape else self._handle(name).get_tensor(name)
            )
        except Exception as error:  # safetensors' own: a dtype of fewer than 8 bits, for example
            raise ModelError(f"tensor {name}: {error}", field=name) from error
        return tensor

    def _own(self, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """A copy on the device, which does not keep the file's mapping."""
        found = tensor.to(self._device, dtype).contiguous()
        # One tensor that stays in the file's mapping would keep all of it, and what was read there, in this process
        mapped = found.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr()
        return found.clone() if mapped else found

    def _handle(self, name: str) -> Any:
        file = self._files.get(name)
        if file is None:
            raise ModelError(f"tensor {name} is missing from {self._directory}", field=name)
        if file not in self._opened:
            self._opened[file] = _open(file)
        return self._opened[file]

    def _slice(self, name: str) -> Any:
        handle = self._handle(name)
        try:
            return handle.get_slice(name)
        except Exception as error:  # safetensors' own: the index may name tensors that the file lacks
            raise ModelError(f"tensor {name}: {error}", field=name) from error


def tensor_files(directory: Path) -> dict[str, Path]:
    """Map each tensor name of a checkpoint to its file, which is a regular one. Raises ModelError naming the file."""
    index = directory / "model.safetensors.index.json"
    if index.exists():
        try:
            names = json.loads(model_limits.text_of(index))["weight_map"]
            found = {name: _inside(directory, file) for name, file in names.items()}
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise ModelError(f"{index}: {error!r}", field=index.name) from error
        for file in sorted(set(found.values())):
            _check_file(file)
        return found
    single = directory / "model.safetensors"
    if not single.exists():
        raise ModelError(f"{directory} has no model.safetensors and no index", field="model.safetensors")
    _check_file(single)
    with _open(single) as handle:
        return dict.fromkeys(handle.keys(), single)


def _inside(directory: Path, file: str) -> Path:
    """The path of a file that an index names. Raises ValueError if it is not directly in the index's directory."""
    if Path(file).name != file:
        raise ValueError(f"{file!r} is not the name of a file in this directory")
    return directory / file


def _check_file(file: Path) -> None:
    try:
        model_limits.check_file(file)
    except FileNotFoundError as error:
        raise ModelError(
            f"{file} is missing, and the index names it: download it too", field=file.name
        ) from error
    except (OSError, ValueError) as error:
        raise ModelError(f"{file}: {error}", field=file.name) from error


def _open(file: Path) -> safe_open:
    """Open a file that `_check_file` has accepted."""
    try:
        return safe_open(str(file), "pt")
    except FileNotFoundError as error:  # for any failure to open it
        if os.access(file, os.R_OK):
            raise ModelError(f"{file}: {error}", field=file.name) from error
        raise ModelError(
            f"{file} may not be read by user {os.geteuid()}: change its owner or its mode (chmod a+r)",
            field=file.name,
        ) from error
    except Exception as error:  # safetensors raises types of its own for damaged files
        raise ModelError(f"{file}: {error}", field=file.name) from error
