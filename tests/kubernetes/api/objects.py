"""The path of an object into the store: defaults, validation, identity, ownership of its fields."""

from __future__ import annotations

import copy
import secrets
import uuid
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

from tests.kubernetes.api import admission, apply, defaults, patches, schemas
from tests.kubernetes.api.errors import ApiError, bad_request, conflict, not_found
from tests.kubernetes.api.kinds import Kind, Kinds, Object, kinds_of_definition
from tests.kubernetes.api.store import Key, Store

Write = Callable[[Object], Object]
SERVICE_NETWORK = "10.96."
SYSTEM_NAMESPACES = ("default", "kube-system")


def timestamp() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


class Objects:
    """The verbs of the API, without HTTP. Everything raises ApiError as a client would see it."""

    def __init__(self) -> None:
        self.store = Store()
        self.kinds = Kinds()
        self._services = 0
        for name in SYSTEM_NAMESPACES:
            self.create(self.kinds.named("Namespace"), {"metadata": {"name": name}})

    # --- reading

    def key(self, kind: Kind, namespace: str, name: str) -> Key:
        return Key(kind, namespace if kind.namespaced else "", name)

    def get(self, kind: Kind, namespace: str, name: str) -> Object:
        return self.store.get(self.key(kind, namespace, name))

    # --- writing

    def create(
        self,
        kind: Kind,
        document: Object,
        manager: str = "tests",
        *,
        keep_status: bool = False,
        dry: bool = False,
    ) -> Object:
        document = _without_nulls(document)
        document.setdefault("apiVersion", kind.api_version)
        document.setdefault("kind", kind.name)
        self._name(kind, document)
        if "status" in kind.subresources and not keep_status:
            document.pop("status", None)
        with self.store.lock:
            self._require_namespace(kind, document)
            document = self._new(kind, document)
            apply.own_changes(kind, None, document, apply.Manager(manager, "Update"), timestamp())
            return document if dry else self._commit_new(kind, document)

    def update(
        self,
        kind: Kind,
        document: Object,
        manager: str = "tests",
        *,
        subresource: str = "",
        dry: bool = False,
    ) -> Object:
        key = self.key(kind, document["metadata"].get("namespace", ""), document["metadata"]["name"])
        with self.store.lock:
            before = self.store.get(key)
            after = self._replaced(kind, before, _without_nulls(document), subresource)
            owner = apply.Manager(manager, "Update", subresource)
            if _without_owners(before) == _without_owners(after):
                return before
            apply.own_changes(kind, before, after, owner, timestamp())
            return after if dry else self._commit(key, after)

    def change(self, kind: Kind, namespace: str, name: str, write: Write, manager: str = "tests") -> Object:
        """Reads, lets `write` change a copy, writes: no conflict can come between."""
        with self.store.lock:
            before = self.get(kind, namespace, name)
            return self.update(kind, write(copy.deepcopy(before)), manager)

    def set_status(self, kind: Kind, document: Object, status: Object, manager: str = "controller") -> Object:
        """Nothing happens where it is the same already, or the object is gone."""
        meta = document["metadata"]
        with self.store.lock:
            live = self.store.find(self.key(kind, meta.get("namespace", ""), meta["name"]))
            if live is None or live["metadata"]["uid"] != meta["uid"] or live.get("status") == status:
                return document
            return self.update(kind, {**live, "status": status}, manager, subresource="status")

    def patch(
        self,
        kind: Kind,
        namespace: str,
        name: str,
        body: Any,
        content_type: str,
        manager: str = "tests",
        *,
        subresource: str = "",
        dry: bool = False,
    ) -> Object:
        with self.store.lock:
            before = self.get(kind, namespace, name)
            after = patches.patched(kind, before, body, content_type)
            expected = (body.get("metadata") or {}).get("resourceVersion") if isinstance(body, dict) else None
            after["metadata"]["resourceVersion"] = expected or before["metadata"]["resourceVersion"]
            return self.update(kind, after, manager, subresource=subresource, dry=dry)

    def apply(
        self,
        kind: Kind,
        namespace: str,
        name: str,
        wanted: Object,
        manager: str,
        *,
        force: bool = False,
        subresource: str = "",
        dry: bool = False,
    ) -> tuple[Object, bool]:
        """(the object, whether it is new)."""
        owner = apply.Manager(manager, "Apply", subresource)
        key = self.key(kind, namespace, name)
        with self.store.lock:
            live = self.store.find(key)
            if live is None and subresource:
                raise not_found(kind.resource, name)
            merged = apply.applied(kind, live, _without_nulls(wanted), owner, force=force, now=timestamp())
            if live is None:
                self._name(kind, merged)
                self._require_namespace(kind, merged)
                if "status" in kind.subresources:
                    merged.pop("status", None)
                owners = merged["metadata"].pop("managedFields")
                document = self._new(kind, merged)
                document["metadata"]["managedFields"] = owners
                return (document if dry else self._commit_new(kind, document)), True
            owners = merged["metadata"]["managedFields"]
            after = self._replaced(kind, live, merged, subresource)
            after["metadata"]["managedFields"] = owners
            return (after if dry else self._commit(key, after)), False

    # --- the parts

    def _name(self, kind: Kind, document: Object) -> None:
        meta = document.setdefault("metadata", {})
        if "name" not in meta and meta.get("generateName"):
            meta["name"] = meta["generateName"] + secrets.token_hex(3)[:5]
        if not meta.get("name"):
            raise bad_request(f"a {kind.name} needs metadata.name")
        if kind.namespaced:
            meta.setdefault("namespace", "default")
        else:
            meta.pop("namespace", None)

    def _require_namespace(self, kind: Kind, document: Object) -> None:
        if not kind.namespaced:
            return
        space = self.kinds.named("Namespace")
        found = self.store.find(Key(space, "", document["metadata"]["namespace"]))
        if found is None:
            raise not_found("namespaces", document["metadata"]["namespace"])
        if found["metadata"].get("deletionTimestamp"):
            raise ApiError(403, "Forbidden", f"namespace {found['metadata']['name']} is being terminated")

    def _new(self, kind: Kind, document: Object) -> Object:
        document["metadata"].pop("resourceVersion", None)
        schemas.validate(kind, document)
        document["metadata"] |= {"uid": str(uuid.uuid4()), "creationTimestamp": timestamp()}
        if "spec" in document:
            document["metadata"]["generation"] = 1
        defaults.fill(kind, document)
        if kind.name == "Service":
            self._assign_address(document["spec"])
        if kind.name == "Pod":
            self._admit_pod(document)
        admission.check(kind, document)
        return document

    def _assign_address(self, spec: Object) -> None:
        if spec["type"] == "ExternalName" or "clusterIP" in spec:
            spec.setdefault("clusterIPs", [spec.get("clusterIP", "")])
            return
        self._services += 1
        spec["clusterIP"] = f"{SERVICE_NETWORK}{self._services // 250}.{self._services % 250 + 1}"
        spec["clusterIPs"] = [spec["clusterIP"]]

    def _admit_pod(self, document: Object) -> None:
        document.setdefault("status", {"phase": "Pending"})
        space, account = document["metadata"]["namespace"], document["spec"]["serviceAccountName"]
        accounts = self.kinds.named("ServiceAccount")
        if account != "default" and self.store.find(Key(accounts, space, account)) is None:
            raise admission.refuse_missing_account(space, account)

    def _commit_new(self, kind: Kind, document: Object) -> Object:
        meta = document["metadata"]
        created = self.store.create(self.key(kind, meta.get("namespace", ""), meta["name"]), document)
        if kind.name == "CustomResourceDefinition":
            self.kinds.add(kinds_of_definition(created))
            conditions = [{"type": name, "status": "True"} for name in ("NamesAccepted", "Established")]
            names = {"acceptedNames": created["spec"]["names"], "storedVersions": []}
            stored = self.store.get(self.key(kind, "", meta["name"]))
            return self.update(
                kind,
                {**stored, "status": {"conditions": conditions, **names}},
                "server",
                subresource="status",
            )
        return created

    def _replaced(self, kind: Kind, before: Object, after: Object, subresource: str) -> Object:
        """`after` with everything that this write may not change as it was."""
        old, new = before["metadata"], after["metadata"]
        if new.get("uid", old["uid"]) != old["uid"]:
            raise conflict(f"{kind.name} {old['name']}: another object has this name now")
        if subresource == "status":
            after = {**copy.deepcopy(before), "status": after.get("status", {})}
            after["metadata"]["resourceVersion"] = new.get("resourceVersion", "")
            schemas.validate(kind, after)
            return after
        for name in (
            "uid",
            "creationTimestamp",
            "generation",
            "deletionTimestamp",
            "deletionGracePeriodSeconds",
        ):
            if name in old:
                new[name] = old[name]
            else:
                new.pop(name, None)
        if "status" in kind.subresources and "status" in before:
            after["status"] = before["status"]
        elif "status" in kind.subresources:
            after.pop("status", None)
        after |= {"apiVersion": before["apiVersion"], "kind": before["kind"]}
        schemas.validate(kind, after)
        if kind.name == "Service" and "clusterIP" not in after["spec"]:
            after["spec"] |= {
                name: before["spec"][name] for name in ("clusterIP", "clusterIPs") if name in before["spec"]
            }
        defaults.fill(kind, after)
        admission.check(kind, after)
        admission.check_change(kind, before, after)
        if _content(before) != _content(after) and "generation" in old:
            new["generation"] = old["generation"] + 1
        return after

    def _commit(self, key: Key, after: Object) -> Object:
        stored = self.store.update(key, after)
        meta = stored["metadata"]
        if meta.get("deletionTimestamp") and not meta.get("finalizers") and key.kind.name != "Pod":
            return self.store.delete(key)
        return stored


def _without_nulls(value: Any) -> Any:
    """A copy without the fields that are null."""
    if isinstance(value, dict):
        return {name: _without_nulls(below) for name, below in value.items() if below is not None}
    if isinstance(value, list):
        return [_without_nulls(below) for below in value]
    return value


def _content(document: Object) -> Object:
    return {name: value for name, value in document.items() if name not in ("metadata", "status")}


def _without_owners(document: Object) -> Object:
    meta = {k: v for k, v in document["metadata"].items() if k not in ("managedFields", "resourceVersion")}
    return {**document, "metadata": meta}
