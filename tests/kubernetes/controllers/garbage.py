"""Objects whose owners are gone, owners that wait for their dependents, and namespaces that are being deleted."""

from __future__ import annotations

import copy

from tests.kubernetes.api import deletion
from tests.kubernetes.api.kinds import Object
from tests.kubernetes.api.store import Key
from tests.kubernetes.controllers.base import Client


class Garbage:
    def __init__(self, client: Client):
        self._client = client

    def step(self) -> None:
        everything = self._client.objects.store.everything()
        present = {stored["metadata"]["uid"] for _, stored in everything}
        for key, stored in everything:
            references = stored["metadata"].get("ownerReferences") or ()
            if references and not any(reference["uid"] in present for reference in references):
                self._delete(key, stored)
            if deletion.FOREGROUND in (stored["metadata"].get("finalizers") or ()):
                self._foreground(key, stored, everything)

    def _delete(self, key: Key, stored: Object) -> None:
        if "deletionTimestamp" not in stored["metadata"] and self._client.objects.store.find(key) is stored:
            self._client.delete(stored)

    def _foreground(self, key: Key, owner: Object, everything: list[tuple[Key, Object]]) -> None:
        uid = owner["metadata"]["uid"]
        dependents = [
            (k, one)
            for k, one in everything
            if any(r["uid"] == uid for r in one["metadata"].get("ownerReferences") or ())
        ]
        for dependent_key, dependent in dependents:
            self._delete(dependent_key, dependent)
        store = self._client.objects.store
        with store.lock:
            live = store.find(key)
            if dependents or live is None or live["metadata"]["uid"] != uid:
                return
            freed = copy.deepcopy(live)
            freed["metadata"]["finalizers"].remove(deletion.FOREGROUND)
            store.update(key, freed)
            if not freed["metadata"]["finalizers"]:
                store.delete(key)


class Namespaces:
    def __init__(self, client: Client):
        self._client = client

    def step(self) -> None:
        store = self._client.objects.store
        for space in self._client.all("Namespace"):
            if "deletionTimestamp" not in space["metadata"]:
                continue
            name = space["metadata"]["name"]
            inside = [(key, one) for key, one in store.everything() if key.namespace == name]
            for key, one in inside:
                if "deletionTimestamp" not in one["metadata"] and store.find(key) is one:
                    self._client.delete(one)
            if not inside:
                store.delete(self._client.objects.key(self._client.kind("Namespace"), "", name))
