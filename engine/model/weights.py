"""Tensors of a checkpoint by name, from one safetensors file or several."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors import safe_open

from cluster.errors import ModelError


class Checkpoint:
    """Reads one tensor at a time, so that a model never lies in memory twice."""

    def __init__(self, directory: Path, dtype: torch.dtype):
        self._dtype = dtype
        self._directory = directory
        index = directory / "model.safetensors.index.json"
        if index.exists():
            names = json.loads(index.read_text())["weight_map"]
            files = {name: directory / file for name, file in names.items()}
        else:
            single = directory / "model.safetensors"
            if not single.exists():
                raise ModelError(
                    f"{directory} has no model.safetensors and no index", field="model.safetensors"
                )
            with safe_open(str(single), "pt") as handle:
                files = dict.fromkeys(handle.keys(), single)
        self._files = files

    def __contains__(self, name: str) -> bool:
        return name in self._files

    def get(self, name: str, *shape: int) -> torch.Tensor:
        """Raises ModelError naming the tensor if it is missing or has another shape."""
        file = self._files.get(name)
        if file is None:
            raise ModelError(f"tensor {name} is missing from {self._directory}", field=name)
        with safe_open(str(file), "pt") as handle:
            tensor: torch.Tensor = handle.get_tensor(name)
        if tuple(tensor.shape) != shape:
            raise ModelError(f"tensor {name} has shape {tuple(tensor.shape)}, expected {shape}", field=name)
        return tensor.to(self._dtype)
