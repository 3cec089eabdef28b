"""Queries of controllers about pods, and the creation of one."""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Iterable
from datetime import UTC, datetime

from tests.kubernetes.api.kinds import Object


def condition(document: Object, name: str) -> Object | None:
    conditions = (document.get("status") or {}).get("conditions") or ()
    return next((one for one in conditions if one["type"] == name), None)


def is_true(document: Object, name: str) -> bool:
    found = condition(document, name)
    return found is not None and found["status"] == "True"


def is_going(pod: Object) -> bool:
    return "deletionTimestamp" in pod["metadata"]


def is_over(pod: Object) -> bool:
    return phase(pod) in ("Succeeded", "Failed")


def phase(pod: Object) -> str:
    return str((pod.get("status") or {}).get("phase", "Pending"))


def is_ready(pod: Object) -> bool:
    return not is_going(pod) and is_true(pod, "Ready")


def is_available(pod: Object, min_ready_seconds: int) -> bool:
    if not is_ready(pod):
        return False
    if not min_ready_seconds:
        return True
    since = (condition(pod, "Ready") or {}).get("lastTransitionTime")
    if since is None:
        return False
    began = datetime.strptime(since, "%Y-%m-%dT%H:%M:%SZ").replace(tzinfo=UTC)
    return (datetime.now(UTC) - began).total_seconds() >= min_ready_seconds


def owner_uid(document: Object) -> str:
    """Of the controller that made it; empty if none did."""
    references = document["metadata"].get("ownerReferences") or ()
    return next((str(one["uid"]) for one in references if one.get("controller")), "")


def owned(documents: Iterable[Object], owner: Object) -> list[Object]:
    return [one for one in documents if owner_uid(one) == owner["metadata"]["uid"]]


def reference_to(owner: Object) -> Object:
    return {
        "apiVersion": owner["apiVersion"],
        "kind": owner["kind"],
        "name": owner["metadata"]["name"],
        "uid": owner["metadata"]["uid"],
        "controller": True,
        "blockOwnerDeletion": True,
    }


def made_from(template: Object, owner: Object, name: str, labels: dict[str, str] | None = None) -> Object:
    """A pod after a template; a `name` that ends in a dash is completed."""
    meta = copy.deepcopy(template.get("metadata") or {})
    meta.pop("creationTimestamp", None)
    meta["labels"] = {**(meta.get("labels") or {}), **(labels or {})}
    meta["namespace"] = owner["metadata"]["namespace"]
    meta["generateName" if name.endswith("-") else "name"] = name
    meta["ownerReferences"] = [reference_to(owner)]
    return {"apiVersion": "v1", "kind": "Pod", "metadata": meta, "spec": copy.deepcopy(template["spec"])}


def template_hash(template: Object) -> str:
    text = json.dumps(template, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:10]


def with_condition(status: Object, name: str, value: bool, reason: str, message: str = "") -> Object:
    """`status` with a condition set; its time stays where it did not change."""
    text = "True" if value else "False"
    conditions = list(status.get("conditions") or ())
    old = next((one for one in conditions if one["type"] == name), None)
    if old is not None and (old["status"], old.get("reason"), old.get("message", "")) == (
        text,
        reason,
        message,
    ):
        return status
    now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    since = old["lastTransitionTime"] if old is not None and old["status"] == text else now
    made = {"type": name, "status": text, "reason": reason, "message": message, "lastTransitionTime": since}
    kept = [one for one in conditions if one["type"] != name]
    return {**status, "conditions": [*kept, made]}
