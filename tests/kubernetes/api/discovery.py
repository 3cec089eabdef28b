"""Discovery: groups, versions and resources, and the server's version."""

from __future__ import annotations

from tests.kubernetes.api.kinds import VERBS, Kinds, Object
from tests.kubernetes.api.schemas import VERSION

_SCALE = {"group": "autoscaling", "version": "v1", "kind": "Scale"}
_EVICTION = {"group": "policy", "version": "v1", "kind": "Eviction"}


def version() -> Object:
    major, minor, _ = VERSION.split(".")
    return {
        "major": major,
        "minor": minor,
        "gitVersion": f"v{VERSION}",
        "gitCommit": "0" * 40,
        "gitTreeState": "clean",
        "buildDate": "2025-01-01T00:00:00Z",
        "goVersion": "go1.24",
        "compiler": "gc",
        "platform": "linux/amd64",
    }


def core_versions() -> Object:
    return {"kind": "APIVersions", "versions": ["v1"], "serverAddressByClientCIDRs": []}


def groups(kinds: Kinds) -> Object:
    versions: dict[str, list[str]] = {}
    for kind in kinds:
        if kind.group and kind.version not in versions.setdefault(kind.group, []):
            versions[kind.group].append(kind.version)
    return {"kind": "APIGroupList", "apiVersion": "v1", "groups": [_group(*one) for one in versions.items()]}


def group(kinds: Kinds, name: str) -> Object | None:
    return next((one for one in groups(kinds)["groups"] if one["name"] == name), None)


def _group(name: str, versions: list[str]) -> Object:
    listed = [{"groupVersion": f"{name}/{version}", "version": version} for version in versions]
    return {
        "kind": "APIGroup",
        "apiVersion": "v1",
        "name": name,
        "versions": listed,
        "preferredVersion": listed[0],
    }


def resources(kinds: Kinds, api_version: str) -> Object | None:
    listed = []
    for kind in kinds:
        if kind.api_version != api_version:
            continue
        common = {"singularName": kind.name.lower(), "namespaced": kind.namespaced}
        entry = {"name": kind.plural, "kind": kind.name, "verbs": list(VERBS), **common}
        listed.append({**entry, "shortNames": list(kind.short)} if kind.short else entry)
        for name in kind.subresources:
            of = {"scale": _SCALE, "eviction": _EVICTION}.get(name, {"kind": kind.name})
            verbs = ["create"] if name in ("eviction", "binding", "token") else ["get", "patch", "update"]
            listed.append({"name": f"{kind.plural}/{name}", **common, **of, "verbs": verbs})
    if not listed:
        return None
    return {"kind": "APIResourceList", "apiVersion": "v1", "groupVersion": api_version, "resources": listed}
