"""The interface of a controller: it reads the objects and takes the next step."""

from __future__ import annotations

from typing import Protocol

from tests.kubernetes.api import deletion
from tests.kubernetes.api.kinds import Kind, Object
from tests.kubernetes.api.objects import Objects


class Controller(Protocol):
    def step(self) -> None:
        """Compares what is wanted with what there is, and changes what can be changed now."""


class Client:
    """The verbs that controllers use, by the names of kinds."""

    def __init__(self, objects: Objects):
        self.objects = objects

    def kind(self, name: str) -> Kind:
        return self.objects.kinds.named(name)

    def all(self, kind: str, namespace: str = "") -> list[Object]:
        return self.objects.store.of_kind(self.kind(kind), namespace)

    def find(self, kind: str, namespace: str, name: str) -> Object | None:
        return self.objects.store.find(self.objects.key(self.kind(kind), namespace, name))

    def create(self, document: Object) -> Object:
        return self.objects.create(self.kind(document["kind"]), document, "controller", keep_status=True)

    def update(self, document: Object) -> Object:
        return self.objects.update(self.kind(document["kind"]), document, "controller")

    def delete(self, document: Object, grace_seconds: int | None = None) -> None:
        meta = document["metadata"]
        options = deletion.Options(grace_seconds=grace_seconds, uid=meta["uid"])
        deletion.delete(
            self.objects, self.kind(document["kind"]), meta.get("namespace", ""), meta["name"], options
        )

    def set_status(self, document: Object, status: Object) -> None:
        self.objects.set_status(self.kind(document["kind"]), document, status)

    def scale(self, document: Object, replicas: int) -> None:
        def write(live: Object) -> Object:
            live["spec"]["replicas"] = replicas
            return live

        meta = document["metadata"]
        self.objects.change(self.kind(document["kind"]), meta["namespace"], meta["name"], write, "controller")

    def adopt(self, document: Object, owner: Object) -> None:
        """Make the object with the reference `owner` its only owner, unless the document is gone."""
        meta = document["metadata"]
        key = self.objects.key(self.kind(document["kind"]), meta["namespace"], meta["name"])
        with self.objects.store.lock:
            live = self.objects.store.find(key)
            if live is not None:
                owned = {**live, "metadata": {**live["metadata"], "ownerReferences": [owner]}}
                self.objects.update(key.kind, owned, "controller")
