"""The objects, and the history that watchers read: every change has the next revision."""

from __future__ import annotations

import copy
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from tests.kubernetes.api.errors import ApiError, already_exists, conflict, not_found
from tests.kubernetes.api.kinds import Kind, Object

HISTORY = 20_000


@dataclass(frozen=True)
class Key:
    kind: Kind
    namespace: str
    name: str


@dataclass(frozen=True)
class Change:
    revision: int
    what: Literal["ADDED", "MODIFIED", "DELETED"]
    key: Key
    before: Object | None
    after: Object


class Store:
    """What is stored is never changed in place: readers get it without a copy and must not change it either."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._objects: dict[Key, Object] = {}
        self._history: deque[Change] = deque(maxlen=HISTORY)
        self._listeners: list[Callable[[], None]] = []
        self._revision = 1

    @property
    def lock(self) -> threading.Condition:
        """Held around reading an object and writing it back; its holder may take it again."""
        return self._changed

    @property
    def revision(self) -> int:
        return self._revision

    def get(self, key: Key) -> Object:
        with self._changed:
            found = self._objects.get(key)
        if found is None:
            raise not_found(key.kind.resource, key.name)
        return found

    def find(self, key: Key) -> Object | None:
        with self._changed:
            return self._objects.get(key)

    def of_kind(self, kind: Kind, namespace: str = "") -> list[Object]:
        with self._changed:
            return [
                stored
                for key, stored in self._objects.items()
                if key.kind == kind and namespace in ("", key.namespace)
            ]

    def everything(self) -> list[tuple[Key, Object]]:
        with self._changed:
            return list(self._objects.items())

    def create(self, key: Key, document: Object) -> Object:
        with self._changed:
            if key in self._objects:
                raise already_exists(key.kind.resource, key.name)
            return self._commit("ADDED", key, None, document)

    def update(self, key: Key, document: Object) -> Object:
        """Raises Conflict where `document` names a revision that is no longer the object's."""
        with self._changed:
            before = self.get(key)
            expected = document["metadata"].get("resourceVersion")
            if expected and expected != before["metadata"]["resourceVersion"]:
                raise conflict(
                    f'Operation cannot be fulfilled on {key.kind.resource} "{key.name}": the object has been '
                    "modified; please apply your changes to the latest version and try again"
                )
            document["metadata"]["resourceVersion"] = before["metadata"]["resourceVersion"]
            if document == before:
                return before
            return self._commit("MODIFIED", key, before, document)

    def delete(self, key: Key) -> Object:
        with self._changed:
            before = self.get(key)
            return self._commit("DELETED", key, before, copy.deepcopy(before))

    def _commit(
        self, what: Literal["ADDED", "MODIFIED", "DELETED"], key: Key, before: Object | None, after: Object
    ) -> Object:
        self._revision += 1
        after["metadata"]["resourceVersion"] = str(self._revision)
        if what == "DELETED":
            del self._objects[key]
        else:
            self._objects[key] = after
        self._history.append(Change(self._revision, what, key, before, after))
        self._changed.notify_all()
        for listener in self._listeners:
            listener()
        return after

    def changes_since(self, revision: int) -> list[Change]:
        """Raises Expired where the history no longer reaches back so far."""
        with self._changed:
            if self._history and self._history[0].revision > revision + 1 and len(self._history) == HISTORY:
                raise ApiError(410, "Expired", f"too old resource version: {revision}")
            found = []
            for change in reversed(self._history):
                if change.revision <= revision:
                    break
                found.append(change)
            return found[::-1]

    def subscribe(self, listener: Callable[[], None]) -> Callable[[], None]:
        """`listener` is called after every change, under the lock; the answer ends that."""
        with self._changed:
            self._listeners.append(listener)
        return lambda: self._listeners.remove(listener)

    def wait_past(self, revision: int, seconds: float) -> int:
        """Until there is a change after `revision`, or the time is over; answers the revision then."""
        deadline = time.monotonic() + seconds
        with self._changed:
            while self._revision <= revision and (left := deadline - time.monotonic()) > 0:
                self._changed.wait(left)
            return self._revision
