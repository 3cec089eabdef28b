"""Kubernetes' published schemas: whether an object is valid, and how its lists merge.

The schemas come with the package kubernetes-validate, in their strict form: an unknown field is an error.
"""

from __future__ import annotations

import functools
import importlib.resources
import json
from dataclasses import dataclass
from typing import Any

import referencing
import referencing.jsonschema
from jsonschema import Draft202012Validator

from tests.kubernetes.api.errors import ApiError, bad_request, invalid
from tests.kubernetes.api.kinds import Kind, Object

VERSION = "1.34.0"
_PREFIX = "#/$defs/"
# Kubernetes answers 400 to what its decoder refuses and 422 to what its validation refuses.
_DECODING = {"type", "additionalProperties"}


@functools.cache
def _definitions(version: str) -> Object:
    folder = importlib.resources.files("kubernetes_validate") / "kubernetes-json-schema"
    loaded: Object = json.loads((folder / f"v{version}-local-strict" / "_definitions.json").read_bytes())
    return loaded


@functools.cache
def _builtin_names(version: str) -> dict[tuple[str, str], str]:
    """(apiVersion, kind) → name of its definition."""
    names: dict[tuple[str, str], str] = {}
    for name, definition in _definitions(version)["$defs"].items():
        for kind in definition.get("x-kubernetes-group-version-kind", ()):
            group = f"{kind['group']}/" if kind["group"] else ""
            names.setdefault((f"{group}{kind['version']}", kind["kind"]), name)
    return names


@functools.cache
def _validator(version: str, name: str) -> Draft202012Validator:
    document = _definitions(version)
    resource = referencing.Resource.from_contents(
        document, default_specification=referencing.jsonschema.DRAFT202012
    )
    uri = "https://kubernetes.io/api/_definitions.json"
    registry: Any = referencing.Registry().with_resources(
        [(uri, resource), (document.get("$id", uri), resource)]
    )
    return Draft202012Validator({"$ref": f"{uri}{_PREFIX}{name}"}, registry=registry)


def validate(kind: Kind, document: Object) -> None:
    """Raises ApiError, naming the field, if the object does not match its schema."""
    if kind.schema is not None:
        validator = Draft202012Validator(_with_type_meta(_closed(kind.schema)))
    else:
        name = _builtin_names(VERSION)[kind.api_version, kind.name]
        validator = _validator(VERSION, name)
    for error in validator.iter_errors(document):
        raise _refusal(kind, document, error)


def _refusal(kind: Kind, document: Object, error: Any) -> ApiError:
    where = ".".join(str(part) for part in error.absolute_path) or "the object"
    name = (document.get("metadata") or {}).get("name", "")
    message = f'{kind.name} "{name}" is invalid: {where}: {error.message[:500]}'
    return bad_request(message) if error.validator in _DECODING else invalid(message)


def _closed(schema: Any) -> Any:
    """A CRD's schema with unknown fields forbidden where the API server would prune them."""
    if isinstance(schema, list):
        return [_closed(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    if schema.get("x-kubernetes-int-or-string"):
        return {"type": ["integer", "string"]}
    closed = {key: _closed(value) for key, value in schema.items()}
    if "properties" in closed and not closed.get("x-kubernetes-preserve-unknown-fields"):
        closed.setdefault("additionalProperties", False)
    if schema.get("nullable") and isinstance(closed.get("type"), str):
        closed["type"] = [closed["type"], "null"]
    return closed


def _with_type_meta(schema: Object) -> Object:
    """Fields that every object has, declared or not; a `metadata` there only narrows names."""
    types = {"apiVersion": {"type": "string"}, "kind": {"type": "string"}, "metadata": {"type": "object"}}
    return {**schema, "properties": {**(schema.get("properties") or {}), **types}}


@dataclass(frozen=True)
class Node:
    """A place in a schema: how a value there merges."""

    schema: Object
    version: str = VERSION

    @property
    def atomic(self) -> bool:
        """The value has one owner as a whole."""
        if self.schema.get("x-kubernetes-map-type") == "atomic":
            return True
        return "items" in self.schema and not self.keys and not self.is_set

    @property
    def keys(self) -> tuple[str, ...]:
        """What identifies an item of this list, for server-side apply."""
        if self.schema.get("x-kubernetes-list-type") == "map":
            return tuple(self.schema["x-kubernetes-list-map-keys"])
        return ()

    @property
    def is_set(self) -> bool:
        return self.schema.get("x-kubernetes-list-type") == "set"

    @property
    def merge_key(self) -> str:
        """What identifies an item of this list, for a strategic merge patch; empty: the list is replaced."""
        if "merge" in self.schema.get("x-kubernetes-patch-strategy", ""):
            return str(self.schema.get("x-kubernetes-patch-merge-key", ""))
        return ""

    def child(self, name: str) -> Node:
        properties = self.schema.get("properties", {})
        below = properties.get(name) or self.schema.get("additionalProperties") or {}
        return self._at(below)

    def item(self) -> Node:
        return self._at(self.schema.get("items") or {})

    def _at(self, below: Any) -> Node:
        return Node(_resolved(below, self.version), self.version)


def _resolved(schema: Any, version: str) -> Object:
    """A reference followed; what stands beside it wins (list types stand beside `$ref`)."""
    if not isinstance(schema, dict):
        return {}
    if reference := schema.get("$ref"):
        target = _definitions(version)["$defs"][reference.rpartition(_PREFIX)[2]]
        return {**target, **{key: value for key, value in schema.items() if key != "$ref"}}
    return schema


META = "io.k8s.apimachinery.pkg.apis.meta.v1.ObjectMeta"


def root(kind: Kind) -> Node:
    if kind.schema is not None:
        meta = _definitions(VERSION)["$defs"][META]
        return Node({**kind.schema, "properties": {**kind.schema.get("properties", {}), "metadata": meta}})
    return Node(_definitions(VERSION)["$defs"][_builtin_names(VERSION)[kind.api_version, kind.name]])
