"""Reads a role's configuration: YAML file, then environment (`BATON_…`), then flags, the later winning."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError
from pydantic_settings import (
    BaseSettings,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    YamlConfigSettingsSource,
)

from cluster.config import Frozen
from cluster.errors import ConfigError

C = TypeVar("C", bound=Frozen)


def load(config: type[C], flags: Mapping[str, Any], file: Path | None = None) -> C:
    """A validated configuration. `flags` holds only what was given, nested like the model.

    Nested fields are `BATON_ENGINE__DTYPE` in the environment. Raises ConfigError naming field and source's value.
    """
    if file is not None and not file.is_file():
        raise ConfigError(f"no configuration file at {file}", field="config")

    class Sources(config, BaseSettings):  # type: ignore[valid-type, misc]
        model_config = SettingsConfigDict(
            env_prefix="BATON_", env_nested_delimiter="__", yaml_file=file, frozen=True, extra="forbid"
        )

        @classmethod
        def settings_customise_sources(
            cls,
            settings_cls: type[BaseSettings],
            init_settings: PydanticBaseSettingsSource,
            env_settings: PydanticBaseSettingsSource,
            dotenv_settings: PydanticBaseSettingsSource,
            file_secret_settings: PydanticBaseSettingsSource,
        ) -> tuple[PydanticBaseSettingsSource, ...]:
            return init_settings, env_settings, YamlConfigSettingsSource(settings_cls)

    try:
        merged = Sources(**flags)
    except ValidationError as error:
        raise ConfigError(_explain(error), field=_first_field(error)) from None
    return config.model_validate(merged.model_dump())


def _first_field(error: ValidationError) -> str:
    return ".".join(str(part) for part in error.errors()[0]["loc"])


def _explain(error: ValidationError) -> str:
    lines = [f"{'.'.join(str(part) for part in e['loc'])}: {e['msg']}" for e in error.errors()]
    return "configuration is not valid: " + "; ".join(lines)
