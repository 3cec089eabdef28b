"""What all settings models share: frozen, no unknown fields, names of the panels that group their flags."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

from pydantic import BaseModel, BeforeValidator, ByteSize, ConfigDict, Field, TypeAdapter, ValidationError

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


class Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    panel: ClassVar[str] = "Settings"  # heading of this model's own fields in --help and docs/settings.md


def no_flag(default: Any, **more: Any) -> Any:
    """A field without a command-line flag: a secret (every user of a machine can read command lines), or one that a
    command sets itself."""
    return Field(default, json_schema_extra={"flag": None}, **more)
