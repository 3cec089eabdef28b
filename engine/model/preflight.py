"""What config.json alone says against the settings. Free of torch: `baton up` asks before it starts any process."""

from __future__ import annotations

from cluster.config.worker import EngineConfig
from cluster.errors import ConfigError
from engine.model.config import ModelConfig
from engine.model.shares import check_shares


def read_model(config: EngineConfig) -> ModelConfig:
    """Read config.json and check the settings against it. Raises ModelError naming the key, or ConfigError naming the
    setting."""
    model = ModelConfig.read(config.model)
    check_shares(model, config.tensor_parallel, expert_parallel=config.expert_parallel)
    check_settings(config, model)
    return model


def check_settings(config: EngineConfig, model: ModelConfig) -> None:
    """Raise ConfigError naming the setting that this model cannot have."""
    if config.quantization == "int8" and model.experts is not None:
        raise ConfigError(
            f"quantization int8: experts are not supported in int8, and {model.family.title} has them: use auto",
            field="quantization",
        )
    if config.max_model_len > model.max_model_len:
        raise ConfigError(
            f"max_model_len {config.max_model_len} exceeds the model's {model.max_model_len}",
            field="max_model_len",
        )
