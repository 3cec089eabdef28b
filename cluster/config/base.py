"""Base of the settings models, and their settings as a flat list, the source of flags, help and docs/settings.md."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ByteSize,
    ConfigDict,
    Field,
    TypeAdapter,
    ValidationError,
)
from pydantic.fields import FieldInfo

from cluster.protocol.names import MAX_NAME

# gRPC counts in 32 bits: bytes, streams, milliseconds.
MAX_COUNT = 2**30
Seconds = Annotated[float, Field(le=1e6)]
Count = Annotated[int, Field(le=MAX_COUNT)]
_SIZE = TypeAdapter(ByteSize)


def _size(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return int(_SIZE.validate_python(value))
    except (ValidationError, OverflowError):
        raise ValueError(f"{value!r} is not a size; write for example 512MiB") from None


Bytes = Annotated[int, BeforeValidator(_size)]  # a number, or text with a unit: 512MiB


def _read_by_others(value: str) -> str:
    if len(value) > MAX_NAME or not value.isprintable():
        raise ValueError(f"at most {MAX_NAME} printable characters: other processes pass over any other name")
    return value


ProcessName = Annotated[str, AfterValidator(_read_by_others)]  # as cluster/membership/reader.py reads it


class Frozen(BaseModel):
    # A comparison lets NaN through, so no bound of a field refuses it, nor a missing one infinity.
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    panel: ClassVar[str] = "Settings"  # heading of this model's own fields in --help and docs/settings.md


def no_flag(default: Any, **more: Any) -> Any:
    """A field without a command-line flag: a secret (every user of a machine can read command lines), or one that a
    command sets itself."""
    return Field(default, json_schema_extra={"flag": None}, **more)


@dataclass(frozen=True)
class Setting:
    """One field of a settings model; `path` leads to it through nested models."""

    path: tuple[str, ...]
    panel: str
    field: FieldInfo

    @property
    def _extra(self) -> Mapping[str, Any]:
        extra = self.field.json_schema_extra
        return extra if isinstance(extra, dict) else {}

    @property
    def flag(self) -> str | None:
        """The parameter's name, with underscores; None = no flag."""
        name = self._extra.get("flag", self.path[-1])
        return None if name is None else str(name)

    @property
    def named_environment(self) -> str | None:
        """The variable that the field itself names."""
        name = self._extra.get("environment")
        return None if name is None else str(name)

    @property
    def environment(self) -> str:
        """The variable that sets it: BATON_…, nested with two underscores, if the field names none."""
        return self.named_environment or "BATON_" + "__".join(self.path).upper()

    @property
    def is_size(self) -> bool:
        return any(isinstance(one, BeforeValidator) for one in self.field.metadata)

    @property
    def default(self) -> str:
        """The default as help and docs/settings.md show it; empty where the description says what holds."""
        value = self.field.default
        if self.field.is_required() or self.field.default_factory or value in (None, "", ()):
            return ""
        if isinstance(value, bool):
            return "on" if value else "off"
        return (
            size_text(value)
            if self.is_size and value
            else f"{value:g}"
            if isinstance(value, float)
            else str(value)
        )


def settings(model: type[Frozen], path: tuple[str, ...] = ()) -> Iterator[Setting]:
    """The settings of a model, nested ones included, in the order of its fields."""
    for name, field in model.model_fields.items():
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, Frozen):
            yield from settings(kind, (*path, name))
        else:
            owner = next(one for one in model.__mro__ if name in inspect.get_annotations(one))
            yield Setting((*path, name), owner.panel, field)  # type: ignore[attr-defined]


def size_text(size: int) -> str:
    """Bytes in the largest binary unit that divides them: 4 MiB."""
    units = ("B", "KiB", "MiB", "GiB", "TiB")
    power = 0
    while size and size % 1024 == 0 and power < len(units) - 1:
        size, power = size // 1024, power + 1
    return f"{size} {units[power]}"


def flags(model: type[Frozen]) -> dict[tuple[str, ...], str]:
    """The flags of a model's settings by their paths, with underscores. A nested setting whose name is not unique has all
    names of its path: --host is the worker's address, --topology-host its machine's name."""
    found = list(settings(model))
    shared = Counter(one.flag for one in found)
    return {
        one.path: one.flag if shared[one.flag] == 1 else "_".join(one.path)
        for one in found
        if one.flag is not None
    }


def flag_text(name: str) -> str:
    return f"--{name.replace('_', '-')}"
