"""A container's environment: values, references to Secrets, ConfigMaps and the pod itself, and `$(NAME)`."""

from __future__ import annotations

import base64
import re
from collections.abc import Mapping

from tests.kubernetes.api.kinds import Object
from tests.kubernetes.api.quantity import amount
from tests.kubernetes.controllers.base import Client

_REFERENCE = re.compile(r"\$(\$)?\(([A-Za-z_][A-Za-z0-9_.-]*)\)")


class MissingObject(Exception):
    """A ConfigMap, a Secret or a key in it is not there (yet)."""


def expand(text: str, known: Mapping[str, str]) -> str:
    """`$(NAME)` where it is known, `$$(NAME)` as `$(NAME)`."""

    def value(match: re.Match[str]) -> str:
        if match[1]:
            return f"$({match[2]})"
        return known.get(match[2], match[0])

    return _REFERENCE.sub(value, text)


def contents(client: Client, kind: str, namespace: str, name: str, *, optional: bool) -> dict[str, bytes]:
    """What a ConfigMap or Secret holds. Raises MissingObject."""
    found = client.find(kind, namespace, name)
    if found is None:
        if optional:
            return {}
        raise MissingObject(f'{kind.lower()} "{name}" not found')
    if kind == "Secret":
        return {key: base64.b64decode(value) for key, value in (found.get("data") or {}).items()}
    plain = {key: value.encode() for key, value in (found.get("data") or {}).items()}
    return plain | {key: base64.b64decode(value) for key, value in (found.get("binaryData") or {}).items()}


def pod_field(pod: Object, path: str) -> str:
    """`metadata.name`, `status.podIP`, `metadata.labels['a']`, …"""
    if match := re.fullmatch(r"metadata\.(labels|annotations)\['(.+)'\]", path):
        return str((pod["metadata"].get(match[1]) or {}).get(match[2], ""))
    if path == "status.hostIP":
        return str(pod["status"].get("hostIP", ""))
    value: object = pod
    for part in path.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    if isinstance(value, dict):
        return "\n".join(f'{name}="{text}"' for name, text in sorted(value.items()))
    return "" if value is None else str(value)


def resource_field(pod: Object, container: Object, reference: Object) -> str:
    """`limits.memory` of a container, in units of the divisor, rounded up."""
    name = reference.get("containerName")
    if name:
        container = next(one for one in pod["spec"]["containers"] if one["name"] == name)
    what, _, resource = reference["resource"].partition(".")
    quantity = ((container.get("resources") or {}).get(what) or {}).get(resource, 0)
    divisor = amount(reference.get("divisor") or 1)
    return str(-int(-amount(quantity) // (divisor or 1)))


def environment_of(client: Client, pod: Object, container: Object, base: Mapping[str, str]) -> dict[str, str]:
    """`base` is the image's. Raises MissingObject."""
    namespace = pod["metadata"]["namespace"]
    made = dict(base)
    for source in container.get("envFrom") or ():
        kind = "Secret" if "secretRef" in source else "ConfigMap"
        reference = source.get("secretRef") or source["configMapRef"]
        found = contents(
            client, kind, namespace, reference["name"], optional=reference.get("optional", False)
        )
        made |= {source.get("prefix", "") + key: value.decode() for key, value in found.items()}
    for entry in container.get("env") or ():
        value = _value(client, pod, container, entry, made)
        if value is not None:
            made[entry["name"]] = value
    return made


def _value(
    client: Client, pod: Object, container: Object, entry: Object, known: Mapping[str, str]
) -> str | None:
    source = entry.get("valueFrom")
    if source is None:
        return expand(entry.get("value", ""), known)
    if reference := source.get("fieldRef"):
        return pod_field(pod, reference["fieldPath"])
    if reference := source.get("resourceFieldRef"):
        return resource_field(pod, container, reference)
    kind = "Secret" if "secretKeyRef" in source else "ConfigMap"
    reference = source.get("secretKeyRef") or source["configMapKeyRef"]
    optional = reference.get("optional", False)
    found = contents(client, kind, pod["metadata"]["namespace"], reference["name"], optional=optional)
    if reference["key"] not in found:
        if optional:
            return None
        raise MissingObject(f'{kind.lower()} "{reference["name"]}" has no key {reference["key"]}')
    return found[reference["key"]].decode()
