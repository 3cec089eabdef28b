"""Builds a runner from a configuration."""

from __future__ import annotations

from cluster.config import EngineConfig
from engine.runner import ModelRunner


def load_runner(config: EngineConfig) -> ModelRunner:
    """Loads the model. Raises ModelError or ConfigError."""
    return ModelRunner(config)
