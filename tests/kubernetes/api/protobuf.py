"""Kubernetes' protobuf form of the few messages that Helm sends in it; answers are always JSON.

Field numbers: generated.proto of k8s.io/api/core/v1 and k8s.io/apimachinery. A message with a field that is not in
these tables is refused rather than half read.
"""

from __future__ import annotations

import base64
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from tests.kubernetes.api.errors import ApiError, bad_request
from tests.kubernetes.api.kinds import Object

CONTENT_TYPE = "application/vnd.kubernetes.protobuf"
MAGIC = b"k8s\x00"
Form = Literal["text", "bytes", "number", "flag", "message", "texts", "map", "bytes map", "time", "drop"]


@dataclass(frozen=True)
class Field:
    name: str
    form: Form
    of: str = ""


MESSAGES: dict[str, dict[int, Field]] = {
    "Unknown": {
        1: Field("typeMeta", "message", "TypeMeta"),
        2: Field("raw", "bytes"),
        3: Field("contentEncoding", "text"),
        4: Field("contentType", "text"),
    },
    "TypeMeta": {1: Field("apiVersion", "text"), 2: Field("kind", "text")},
    "Time": {1: Field("seconds", "number"), 2: Field("nanos", "number")},
    "ObjectMeta": {
        1: Field("name", "text"),
        2: Field("generateName", "text"),
        3: Field("namespace", "text"),
        4: Field("selfLink", "text"),
        5: Field("uid", "text"),
        6: Field("resourceVersion", "text"),
        7: Field("generation", "number"),
        8: Field("creationTimestamp", "drop"),
        9: Field("deletionTimestamp", "drop"),
        10: Field("deletionGracePeriodSeconds", "number"),
        11: Field("labels", "map"),
        12: Field("annotations", "map"),
        14: Field("finalizers", "texts"),
        17: Field("managedFields", "drop"),
    },
    "Secret": {
        1: Field("metadata", "message", "ObjectMeta"),
        2: Field("data", "bytes map"),
        3: Field("type", "text"),
        4: Field("stringData", "map"),
        5: Field("immutable", "flag"),
    },
    "ConfigMap": {
        1: Field("metadata", "message", "ObjectMeta"),
        2: Field("data", "map"),
        3: Field("binaryData", "bytes map"),
        4: Field("immutable", "flag"),
    },
    "NamespaceSpec": {1: Field("finalizers", "texts")},
    "NamespaceStatus": {1: Field("phase", "text")},
    "Namespace": {
        1: Field("metadata", "message", "ObjectMeta"),
        2: Field("spec", "message", "NamespaceSpec"),
        3: Field("status", "message", "NamespaceStatus"),
    },
    "Preconditions": {1: Field("uid", "text"), 2: Field("resourceVersion", "text")},
    "DeleteOptions": {
        1: Field("gracePeriodSeconds", "number"),
        2: Field("preconditions", "message", "Preconditions"),
        3: Field("orphanDependents", "flag"),
        4: Field("propagationPolicy", "text"),
        5: Field("dryRun", "texts"),
    },
}


def decode(body: bytes) -> Object:
    """The object in a request's body. Raises ApiError."""
    if not body.startswith(MAGIC):
        raise bad_request("the body is not Kubernetes' protobuf")
    try:
        unknown = _message("Unknown", body[len(MAGIC) :])
        types = unknown["typeMeta"]
        if types["kind"] not in MESSAGES:
            raise ApiError(415, "UnsupportedMediaType", f"{types['kind']} is only understood as JSON")
        return {**types, **_message(types["kind"], base64.b64decode(unknown.get("raw", "")))}
    except (IndexError, KeyError, ValueError) as error:
        raise bad_request(f"broken protobuf: {error!r}") from error


def _message(name: str, data: bytes) -> Object:
    known = MESSAGES[name]
    document: Object = {}
    for number, value in _fields(data):
        if number not in known:
            raise ApiError(
                415, "UnsupportedMediaType", f"field {number} of {name} is only understood as JSON"
            )
        field = known[number]
        if field.form == "drop":
            continue
        if field.form == "texts":
            document.setdefault(field.name, []).append(value.decode())
        elif field.form in ("map", "bytes map"):
            entry = dict(_fields(value))
            document.setdefault(field.name, {})[entry[1].decode()] = _text(entry.get(2, b""), field.form)
        else:
            document[field.name] = _scalar(field, value)
    # Go writes empty strings and zeros, JSON leaves them out.
    return {key: value for key, value in document.items() if value not in ("", {}, [])}


def _text(value: bytes, form: Form) -> str:
    return value.decode() if form == "map" else base64.b64encode(value).decode()


def _scalar(field: Field, value: Any) -> Any:
    match field.form:
        case "text":
            return value.decode()
        case "bytes":
            return base64.b64encode(value).decode()
        case "flag":
            return bool(value)
        case "message":
            return _message(field.of, value)
    return value


def _fields(data: bytes) -> Iterator[tuple[int, Any]]:
    place = 0
    while place < len(data):
        tag, place = _varint(data, place)
        number, wire = tag >> 3, tag & 7
        if wire == 0:
            value, place = _varint(data, place)
            yield number, value
        elif wire == 2:
            length, place = _varint(data, place)
            if place + length > len(data):
                raise ValueError("a field is cut off")
            yield number, data[place : place + length]
            place += length
        else:
            raise ValueError(f"wire type {wire}")


def _varint(data: bytes, place: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[place]
        place += 1
        value |= (byte & 0x7F) << shift
        if not byte & 0x80:
            return value, place
        shift += 7
