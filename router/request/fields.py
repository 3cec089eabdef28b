"""Bounds of a request's fields: markers in a model's annotations, from which both checks and JSON schema follow.

Some bounds depend on a router's settings or its model. A marker holds the name of such a bound: checks look it up in the
FieldLimits that `read` was given, and a schema shows it as `{"$limit": name}` until `filled` puts the value there.
"""

from __future__ import annotations

import math
import reprlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, ClassVar, TypeVar

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    ValidationError,
    ValidationInfo,
)
from pydantic_core import CoreSchema, ErrorDetails, PydanticCustomError, core_schema

from cluster.errors import InvalidRequestError, UnsupportedFieldError
from router.request.limits import MAX_SHOWN, FieldLimits

# The least normal float of 32 bits: smaller values arrive over gRPC as 0, which there means "not set"
MIN_POSITIVE = 2.0**-126
Bound = float | str
Schema = dict[str, Any]
M = TypeVar("M", bound="RequestModel")


class _Repr(reprlib.Repr):
    def repr_dict(self, x: dict[Any, Any], level: int) -> str:
        """In their own order: sorting the members that a body may have takes 25 ms of the event loop."""
        if not x or level <= 0:
            return "{...}" if x else "{}"
        shown = islice(x.items(), self.maxdict)
        pieces = [f"{self.repr1(key, level - 1)}: {self.repr1(one, level - 1)}" for key, one in shown]
        return f"{{{', '.join([*pieces, *(['...'] if len(x) > self.maxdict else [])])}}}"


_SHOWN = _Repr()
_SHOWN.maxstring = _SHOWN.maxother = MAX_SHOWN
_WRONG_TYPE = {
    "bool_type": "must be true or false",
    "dict_type": "must be an object",
    "float_type": "{shown} is not a number",
    "int_type": "{shown} is not a whole number",
    "list_type": "must be a list",
    "literal_error": "must be one of {expected}",
    "missing": "is missing",
    "model_type": "must be an object",
    "string_type": "must be a string",
}


def shown(value: object) -> str:
    """`repr` of a value of any type and size, cut to MAX_SHOWN characters."""
    return _SHOWN.repr(value)[:MAX_SHOWN]


def refuse(name: str, text: str, limit: object = "") -> InvalidRequestError:
    return InvalidRequestError(f"{name}: {text}", field=name, limit=str(limit))


def numbered(name: str, index: int, count: int) -> str:
    """The name of one entry of a field in errors; that of the field where it has no other."""
    return name if count == 1 else f"{name}[{index}]"


def wrong(text: str, limit: object = "") -> PydanticCustomError:
    """An error of one field, from its validator; `read` adds the name."""
    return PydanticCustomError("wrong", "{text}", {"text": text, "limit": str(limit)})


def text_or_list(of: str) -> Callable[[object], Any]:
    """The validator of a content, which is read apart so that errors name the place in it. `of`: what its list holds."""

    def check(value: object) -> Any:
        if not isinstance(value, str | list):
            raise wrong(f"must be text or a list of {of}")
        return value

    return check


def unsupported(text: str) -> PydanticCustomError:
    """The error of a field that is not supported; it is reported before others."""
    return PydanticCustomError("unsupported", "{text}", {"text": text})


def range_error(value: float, low: float, high: float) -> tuple[str, str] | None:
    """Text and limit of the error that `value` is not in `low` … `high`; None if it is."""
    if low <= value <= high:
        return None
    limit = f"{low} … {high}"
    if isinstance(value, float) and not math.isfinite(value):
        return f"{shown(value)} is not a number", limit
    return f"{shown(value)} is outside {limit}", limit


def same_json(value: object, other: object) -> bool:
    """Whether two values are equal in JSON: false is not 0."""
    return type(value) is type(other) and value == other


class RequestModel(BaseModel):
    """Base of what is read from clients. A field that is null is as one that is missing."""

    model_config = ConfigDict(strict=True, frozen=True, hide_input_in_errors=True)
    names: ClassVar[frozenset[str]] = frozenset()  # of the fields, as clients write them
    # Fields that errors call by the names of the fields in them
    objects: ClassVar[frozenset[str]] = frozenset()
    error_names: ClassVar[Mapping[str, str]] = {}  # fields that errors call by another name

    @classmethod
    def __pydantic_init_subclass__(cls, **arguments: Any) -> None:
        cls.names = frozenset(field.alias or name for name, field in cls.model_fields.items())


def read(model: type[M], values: object, limits: FieldLimits, part: str = "") -> M:
    """Check `values`, which are that `part` of a request. Raises InvalidRequestError or UnsupportedFieldError."""
    try:
        # What model_validate calls, without the 2 µs that its own arguments cost a request
        made: M = model.__pydantic_validator__.validate_python(values, context=limits)
        return made
    except ValidationError as error:
        errors = error.errors(include_url=False)
    first = next((one for one in errors if one["type"] == "unsupported"), errors[0])
    raise _refusal(first, model, part)


def _refusal(error: ErrorDetails, model: type[RequestModel], part: str) -> InvalidRequestError:
    field, *inner = map(str, error["loc"] or ("",))  # without a place: the part is no object
    if inner and field == "stream_options":
        field = inner.pop(0)
    if inner and field in model.objects:
        field = f"{field}.{inner.pop(0)}"
    name = ".".join(filter(None, (part, model.error_names.get(field, field))))
    context = error.get("ctx", {})
    if error["type"] == "unsupported":
        return UnsupportedFieldError(f"{name}: {context['text']}", field=name)
    text = context.get("text")
    if text is None:
        template = _WRONG_TYPE.get(error["type"], "is not valid")
        text = template.format(shown=shown(error["input"]), expected=context.get("expected"))
    if inner and text.startswith("must"):
        text = f"each entry {text}"
    return refuse(name, text, context.get("limit", ""))


def limits_of(info: ValidationInfo) -> FieldLimits:
    assert isinstance(info.context, FieldLimits), "a request model is read with limits"
    return info.context


def filled(schema: Any, limits: FieldLimits) -> Any:
    """The schema with the values of the limits that it names."""
    if isinstance(schema, list):
        return [filled(one, limits) for one in schema]
    if not isinstance(schema, dict):
        return schema
    if schema.keys() == {"$limit"}:
        return limits[schema["$limit"]]
    return {key: filled(value, limits) for key, value in schema.items()}


def _named(bounds: Mapping[str, Bound]) -> Schema:
    return {key: {"$limit": one} if isinstance(one, str) else one for key, one in bounds.items()}


def late(**bounds: Bound) -> Any:
    """Show these bounds in the schema. The check needs the whole request: router/request/validator.py makes it."""
    return Field(json_schema_extra=_named(bounds))


class _Marker:
    """Checks a value before or after its type is checked, and adds to its schema."""

    before: ClassVar[bool] = False
    check: Callable[..., Any]
    bounds: Callable[[Schema], Mapping[str, Bound]]

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        if self.before:
            return core_schema.with_info_before_validator_function(self.check, handler(source))
        return core_schema.with_info_after_validator_function(self.check, handler(source))

    def __get_pydantic_json_schema__(self, core: CoreSchema, handler: GetJsonSchemaHandler) -> Schema:
        schema = handler(core)
        return {**schema, **_named(self.bounds(schema))}


@dataclass(frozen=True)
class Within(_Marker):
    """A number from `low` to `high`, both included, or `above` the lower one."""

    low: float
    high: Bound
    above: bool = False

    def check(self, value: float, info: ValidationInfo) -> float:
        high = limits_of(info)[self.high] if isinstance(self.high, str) else self.high
        if error := range_error(value, self.low, high):
            raise wrong(*error)
        if not self.above:
            return value
        if value == self.low:
            raise wrong(f"must be greater than {self.low:g}", f"> {self.low:g}")
        return max(value, MIN_POSITIVE)

    def bounds(self, schema: Schema) -> Mapping[str, Bound]:
        return {"exclusiveMinimum" if self.above else "minimum": self.low, "maximum": self.high}


@dataclass(frozen=True)
class Length(_Marker):
    """A text of `low` … `high` characters."""

    low: int
    high: int | str

    def check(self, value: str, info: ValidationInfo) -> str:
        high, setting = self.high, ""
        if isinstance(high, str):
            high, setting = limits_of(info)[high], f" ({high})"
        if not self.low <= len(value) <= high:
            raise wrong(f"must have {self.low} … {high} characters{setting}", high)
        return value

    def bounds(self, schema: Schema) -> Mapping[str, Bound]:
        return {"minLength": self.low, "maxLength": self.high}


@dataclass(frozen=True)
class AtMost(_Marker):
    """A list or an object with no more entries than the limit of this name. Counted before anything iterates over it,
    for a body can hold millions; the containers of a gRPC message are copied only then."""

    limit: str
    before = True

    def check(self, value: Any, info: ValidationInfo) -> Any:
        if not isinstance(value, Sequence | Mapping) or isinstance(value, str):
            return value  # of the wrong type
        most = limits_of(info)[self.limit]
        if len(value) > most:
            raise wrong(f"at most {most} entries are allowed ({self.limit})", most)
        if isinstance(value, list | dict):
            return value
        return dict(value) if isinstance(value, Mapping) else list(value)

    def bounds(self, schema: Schema) -> Mapping[str, Bound]:
        if schema["type"] == "array":
            return {"maxItems": self.limit}
        return {"maxProperties": self.limit, "additionalProperties": False}  # beside those that match the key


class OnlyNeutral:
    """A field that is not supported, and is accepted with values that ask for nothing."""

    def __init__(self, *values: Any):
        self._values = [*values, None]

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_plain_validator_function(self._check)

    def __get_pydantic_json_schema__(self, core: CoreSchema, handler: GetJsonSchemaHandler) -> Schema:
        return {
            "enum": self._values,
            "description": "not supported: only these values, which ask for nothing",
        }

    def _check(self, value: Any) -> None:
        if not any(same_json(value, one) for one in self._values):
            raise unsupported("is not supported yet")
