"""Short functions that make JSON Schema."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

Schema = dict[str, Any]


def text(**more: Any) -> Schema:
    return {"type": "string", **more}


def array(items: Schema, **more: Any) -> Schema:
    return {"type": "array", "items": items, **more}


def one_of(values: Sequence[Any], **more: Any) -> Schema:
    return {"enum": list(values), **more}


def either(*schemas: Schema, **more: Any) -> Schema:
    return {"anyOf": list(schemas), **more}


def optional(schema: Schema) -> Schema:
    """Null means the same as a missing field."""
    if schema.keys() == {"anyOf"}:
        return either(*schema["anyOf"], NULL)
    if "const" in schema or not isinstance(schema.get("type"), str):
        return either(schema, NULL)
    null = {"enum": [*schema["enum"], None]} if "enum" in schema else {}
    return {**schema, **null, "type": [schema["type"], "null"]}


def record(properties: Mapping[str, Schema], required: Sequence[str] | None = None, **more: Any) -> Schema:
    """An object with these fields and no others; all are always there unless `required` names fewer."""
    names = list(properties) if required is None else list(required)
    return {
        "type": "object",
        "properties": dict(properties),
        "required": names,
        "additionalProperties": False,
        **more,
    }


def some(**properties: Schema) -> Schema:
    """An object with at least these fields: further ones depend on the cluster."""
    return {"type": "object", "properties": properties, "required": list(properties)}


def ref(name: str) -> Schema:
    return {"$ref": f"#/components/schemas/{name}"}


COUNT: Schema = {"type": "integer", "minimum": 0}
NUMBER: Schema = {"type": "number"}
BOOLEAN: Schema = {"type": "boolean"}
NULL: Schema = {"type": "null"}
