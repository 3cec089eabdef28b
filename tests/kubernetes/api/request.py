"""A request as the handlers see it: its objects, verb and body."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import parse_qsl

import yaml

from tests.kubernetes.api import protobuf
from tests.kubernetes.api.errors import ApiError, bad_request, not_found
from tests.kubernetes.api.kinds import Kind, Kinds

APPLY = "application/apply-patch+yaml"


@dataclass(frozen=True)
class Target:
    """What a path under /api or /apis means."""

    kind: Kind
    namespace: str = ""
    name: str = ""
    subresource: str = ""

    @property
    def resource(self) -> str:
        """As a Role names it."""
        return f"{self.kind.plural}/{self.subresource}" if self.subresource else self.kind.plural


def find_target(kinds: Kinds, api_version: str, parts: list[str]) -> Target:
    """`parts` is the path behind the version. Raises ApiError (404)."""
    namespace = ""
    if parts[0] == "namespaces" and len(parts) > 2 and parts[2] not in ("status", "finalize"):
        namespace, parts = parts[1], parts[2:]
    kind = kinds.of_path(api_version, parts[0])
    if kind is None or (namespace and not kind.namespaced):
        raise not_found(f"{api_version} {parts[0]}", "the server could not find the requested resource")
    name, subresource = [*parts[1:], "", ""][:2]
    if len(parts) > 3 or (subresource and subresource not in kind.subresources):
        raise not_found(kind.resource, "/".join(parts[1:]))
    return Target(kind, namespace, name, subresource)


@dataclass(frozen=True)
class Request:
    method: str
    path: str
    query: Mapping[str, str]
    headers: Mapping[str, str]
    raw: bytes = field(repr=False)

    @staticmethod
    def of(scope: Mapping[str, Any], raw: bytes) -> Request:
        headers = {name.decode().lower(): value.decode("latin-1") for name, value in scope["headers"]}
        query = dict(parse_qsl(scope["query_string"].decode(), keep_blank_values=True))
        return Request(scope["method"], scope["path"], query, headers, raw)

    @property
    def token(self) -> str:
        scheme, _, token = self.headers.get("authorization", "").partition(" ")
        return token if scheme.lower() == "bearer" else ""

    @property
    def manager(self) -> str:
        """The owner of the fields that this request sets: as named, or the client's program."""
        agent = self.headers.get("user-agent", "unknown").partition("/")[0]
        return self.query.get("fieldManager") or agent

    @property
    def content_type(self) -> str:
        return self.headers.get("content-type", "application/json").partition(";")[0]

    @property
    def dry(self) -> bool:
        return "dryRun" in self.query

    def flag(self, name: str) -> bool:
        return self.query.get(name, "") in ("true", "1")

    def body(self) -> Any:
        """Raises ApiError where it does not match its content type."""
        if not self.raw:
            return {}
        try:
            if self.content_type == protobuf.CONTENT_TYPE:
                return protobuf.decode(self.raw)
            if self.content_type in (APPLY, "application/yaml"):
                return yaml.safe_load(self.raw)
            return json.loads(self.raw)
        except (ValueError, yaml.YAMLError) as error:
            raise bad_request(f"the body is not {self.content_type}: {error}") from error

    def document(self) -> dict[str, Any]:
        body = self.body()
        if not isinstance(body, dict):
            raise ApiError(400, "BadRequest", "the body is not an object")
        return body
