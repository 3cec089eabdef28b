"""Random JSON schemas whose answers are bounded in length."""

from __future__ import annotations

import json
import random
from typing import Any

import jsonschema

Schema = dict[str, Any]
_NAMES = ("name", "age", "ok", "tags", "x-1", "Größe", "a b", "id", "note", 'q"')


def schema_of(seed: int) -> Schema:
    rng = random.Random(seed)
    schema = _Maker(rng).any(3)
    if rng.random() < 0.2:
        parts = {f"part{i}": _Maker(rng).any(1) for i in range(2)}
        schema = {"$defs": parts, "type": "object", "additionalProperties": False}
        schema["properties"] = {f"of {name}": {"$ref": f"#/$defs/{name}"} for name in parts}
        schema["required"] = list(schema["properties"])
    return schema


def validate(text: str, schema: Schema) -> None:
    """Raises ValueError or jsonschema.ValidationError."""
    kind = jsonschema.Draft202012Validator
    kind(schema, format_checker=kind.FORMAT_CHECKER).validate(json.loads(text))


class _Maker:
    def __init__(self, rng: random.Random):
        self._rng = rng

    def any(self, depth: int) -> Schema:
        kinds = [self._string, self._integer, self._number, self._enum, self._const, self._plain]
        kinds += [self._object, self._array, self._any_of] * 2 if depth else []
        made = self._rng.choice(kinds)(depth - 1)
        if self._rng.random() < 0.2:
            made |= {"title": "a title", "description": "what it is", "default": None}
        return made

    def _string(self, depth: int) -> Schema:
        rng = self._rng
        kind = rng.choice(["length", "pattern", "format"])
        if kind == "pattern":
            return {
                "type": "string",
                "pattern": rng.choice(["^[a-z]{1,6}$", "^(foo|bar)[0-9]{2}$", r"^\d{3}-\d{2}$"]),
            }
        if kind == "format":
            return {"type": "string", "format": rng.choice(["date", "uuid", "time"])}
        least = rng.randrange(3)
        return {"type": "string", "minLength": least, "maxLength": least + rng.randrange(8)}

    def _integer(self, depth: int) -> Schema:
        least = self._rng.randint(-1000, 1000)
        return {"type": "integer", "minimum": least, "maximum": least + self._rng.randrange(500)}

    def _number(self, depth: int) -> Schema:
        return {"enum": [0.5, 1, -2.25, 1e3]} if self._rng.random() < 0.5 else self._integer(depth)

    def _enum(self, depth: int) -> Schema:
        values = ["red", "blue", 'a "quoted" one', "line\nbreak", "ß", 7, True, None, [1, 2], {"k": "v"}]
        return {"enum": self._rng.sample(values, self._rng.randint(1, 4))}

    def _const(self, depth: int) -> Schema:
        return {"const": self._rng.choice(["fixed", 12, False, None, {"a": [1, {"b": "c"}]}])}

    def _plain(self, depth: int) -> Schema:
        return {"type": self._rng.choice(["boolean", "null", ["boolean", "null"]])}

    def _object(self, depth: int) -> Schema:
        names = self._rng.sample(_NAMES, self._rng.randrange(4))
        schema: Schema = {"type": "object", "additionalProperties": False}
        schema["properties"] = {name: self.any(depth) for name in names}
        schema["required"] = [name for name in names if self._rng.random() < 0.7]
        return schema

    def _array(self, depth: int) -> Schema:
        least = self._rng.randrange(3)
        most = least + self._rng.randrange(3)
        schema: Schema = {"type": "array", "minItems": least, "maxItems": most, "items": self.any(depth)}
        if self._rng.random() < 0.3:
            first = [self.any(depth) for _ in range(2)]
            schema |= {
                "prefixItems": first,
                "items": False,
                "minItems": self._rng.randrange(3),
                "maxItems": 2,
            }
        return schema

    def _any_of(self, depth: int) -> Schema:
        return {"anyOf": [self.any(depth) for _ in range(self._rng.randint(1, 3))]}
