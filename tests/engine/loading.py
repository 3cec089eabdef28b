"""Loading a model on a card whose memory is counted."""

from __future__ import annotations

from pathlib import Path

import pytest
from torch import Tensor

from cluster.config.worker import EngineConfig
from engine.model.weights import Checkpoint
from tests.engine.fake_memory import FakeMemory

MIB = 1 << 20


def settings(**more: object) -> EngineConfig:
    fixed = {"model": Path("/m"), "device": "cuda", "dtype": "bfloat16", "max_model_len": 256}
    return EngineConfig(**{**fixed, **more})  # type: ignore[arg-type]


class Loading(FakeMemory):
    """Bytes read from the checkpoint are in use."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, total: int, peak: int = 0):
        super().__init__(total, peak=peak, is_host=True)
        get = Checkpoint.get

        def counted(checkpoint: Checkpoint, *arguments: object, **named: object) -> Tensor:
            tensor = get(checkpoint, *arguments, **named)  # type: ignore[arg-type]
            self.used += tensor.numel() * tensor.itemsize
            self.calls.append("load")
            return tensor

        monkeypatch.setattr(Checkpoint, "get", counted)
