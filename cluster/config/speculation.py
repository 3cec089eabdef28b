"""Checks of the settings of speculative decoding."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

from cluster.errors import ConfigError

DEFAULT_DRAFTS = 4
_SETTINGS = ("speculation", "speculative_tokens", "draft_model", "draft_kv_memory_bytes")


class Settings(Protocol):
    """The settings of EngineConfig that are checked here."""

    @property
    def speculation(self) -> str: ...
    @property
    def speculative_tokens(self) -> int: ...
    @property
    def draft_model(self) -> Path | None: ...
    @property
    def draft_kv_memory_bytes(self) -> int: ...
    @property
    def overlap(self) -> str: ...
    @property
    def max_batch_requests(self) -> int: ...
    @property
    def max_batch_tokens(self) -> int: ...


class DraftSource(NamedTuple):
    """The setting that asks for drafts, and its value."""

    setting: Literal["speculation", "draft_model"]
    value: str

    @property
    def flag(self) -> str:
        return f"--{self.setting.replace('_', '-')} {self.value}"

    @property
    def off(self) -> str:
        """The value that turns drafts off, for messages."""
        return "speculation none" if self.setting == "speculation" else "no draft_model"

    def __str__(self) -> str:
        return f"speculation {self.value}" if self.setting == "speculation" else self.setting


def draft_source(engine: Settings) -> DraftSource | None:
    """Return the setting that asks for drafts, or None."""
    if engine.draft_model is not None:
        return DraftSource("draft_model", str(engine.draft_model))
    return None if engine.speculation == "none" else DraftSource("speculation", engine.speculation)


def without_drafts(settings: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return settings that both roles share without those of speculation, which a prefill worker refuses."""
    engine = settings.get("engine")
    if not isinstance(engine, Mapping):
        return settings
    return {**settings, "engine": {name: engine[name] for name in engine if name not in _SETTINGS}}


def check(engine: Settings) -> None:
    """Raise ConfigError for settings that exclude each other or have no effect, ValueError for those that leave a step
    no room for drafts."""
    _check_source(engine)
    source = draft_source(engine)
    if source is None:
        _check_unused(engine)
        return
    if engine.overlap == "on":
        raise ValueError(
            f"overlap on launches a step before the tokens of the last one are known, but {source} needs them: use "
            f"overlap auto or {source.off}"
        )
    name = "max_batch_requests" if engine.max_batch_requests < 2 else "max_batch_tokens"
    if getattr(engine, name) < 2:
        raise ValueError(
            f"{name} {getattr(engine, name)} leaves a step no room for drafts: {source} needs 2 or more; 16 for "
            "all that speculative_tokens may allow"
        )


def check_prefill(engine: Settings) -> None:
    """Raise ConfigError if a prefill worker's settings ask for drafts."""
    if (source := draft_source(engine)) is not None:
        raise ConfigError(
            f"{source.flag} has no effect on a prefill worker, which generates no tokens: set it on decode workers only",
            field=source.setting,
        )


def _check_source(engine: Settings) -> None:
    if engine.draft_model is not None and engine.speculation != "none":
        raise ConfigError(
            f"--draft-model and --speculation {engine.speculation} exclude each other: drafts come from one of them",
            field="draft_model",
        )
    if engine.draft_kv_memory_bytes and engine.draft_model is None:
        raise ConfigError(
            "--draft-kv-memory has no effect without --draft-model: leave it out", field="draft_kv_memory"
        )


def _check_unused(engine: Settings) -> None:
    if engine.speculative_tokens:
        raise ConfigError(
            f"--speculative-tokens {engine.speculative_tokens} has no effect with speculation none: add --speculation "
            "ngram or --draft-model, or leave it out",
            field="speculative_tokens",
        )
