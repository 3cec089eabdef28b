"""Deletion: graceful for pods, delayed by finalizers, and its effect on an object's dependents."""

from __future__ import annotations

import copy
from dataclasses import dataclass

from tests.kubernetes.api.errors import conflict
from tests.kubernetes.api.kinds import Kind, Object, kinds_of_definition
from tests.kubernetes.api.objects import Objects, timestamp
from tests.kubernetes.api.store import Key

FOREGROUND = "foregroundDeletion"


@dataclass(frozen=True)
class Options:
    grace_seconds: int | None = None
    propagation: str = "Background"
    uid: str = ""
    dry: bool = False

    @staticmethod
    def of(document: Object) -> Options:
        orphan = document.get("orphanDependents")
        default = "Orphan" if orphan else "Background"
        return Options(
            document.get("gracePeriodSeconds"),
            document.get("propagationPolicy", default),
            (document.get("preconditions") or {}).get("uid", ""),
            bool(document.get("dryRun")),
        )


def delete(objects: Objects, kind: Kind, namespace: str, name: str, options: Options | None = None) -> Object:
    """The object as it is then: gone, or marked. Raises ApiError."""
    options = options or Options()
    key = objects.key(kind, namespace, name)
    with objects.store.lock:
        before = objects.store.get(key)
        if options.uid and options.uid != before["metadata"]["uid"]:
            raise conflict(f"{kind.name} {name}: the precondition names another uid")
        if options.dry:
            return before
        if options.propagation == "Orphan":
            _orphan(objects, before)
        finalizers = list(before["metadata"].get("finalizers") or ())
        if options.propagation == "Foreground" and FOREGROUND not in finalizers:
            finalizers.append(FOREGROUND)
        grace = _grace_seconds(kind, before, options)
        if not finalizers and grace == 0 and kind.name != "Namespace":
            if kind.name == "CustomResourceDefinition":
                _drop_definition(objects, before)
            return objects.store.delete(key)
        return _mark(objects, key, before, finalizers, grace)


def _mark(objects: Objects, key: Key, before: Object, finalizers: list[str], grace: int) -> Object:
    meta = before["metadata"]
    already = meta.get("deletionTimestamp")
    if (
        already
        and grace >= meta.get("deletionGracePeriodSeconds", 0)
        and finalizers == meta.get("finalizers", [])
    ):
        return before
    after = copy.deepcopy(before)
    after["metadata"] |= {"deletionTimestamp": already or timestamp(), "deletionGracePeriodSeconds": grace}
    if finalizers:
        after["metadata"]["finalizers"] = finalizers
    if key.kind.name == "Namespace":
        after["status"] = {"phase": "Terminating"}
    return objects.store.update(key, after)


def _grace_seconds(kind: Kind, document: Object, options: Options) -> int:
    if kind.name != "Pod":
        return 0
    ended = document["status"].get("phase") in ("Succeeded", "Failed")
    if ended or "nodeName" not in document["spec"]:
        return 0
    own = int(document["spec"]["terminationGracePeriodSeconds"])
    return own if options.grace_seconds is None else options.grace_seconds


def _orphan(objects: Objects, owner: Object) -> None:
    uid = owner["metadata"]["uid"]
    for key, dependent in objects.store.everything():
        references = dependent["metadata"].get("ownerReferences") or []
        if any(reference["uid"] == uid for reference in references):
            freed = copy.deepcopy(dependent)
            freed["metadata"]["ownerReferences"] = [one for one in references if one["uid"] != uid]
            objects.store.update(key, freed)


def _drop_definition(objects: Objects, definition: Object) -> None:
    gone = kinds_of_definition(definition)
    for kind in gone:
        for custom in objects.store.of_kind(kind):
            meta = custom["metadata"]
            objects.store.delete(objects.key(kind, meta.get("namespace", ""), meta["name"]))
    objects.kinds.remove(gone)
