"""Watches: the events of a target since a revision, as they come.

With `sendInitialEvents` (WatchList) the stream begins with what there is, followed by a bookmark that says so:
clients wait for it.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator

from tests.kubernetes.api.errors import ApiError
from tests.kubernetes.api.kinds import Object
from tests.kubernetes.api.request import Request, Target
from tests.kubernetes.api.selectors import Test, field_test, label_test
from tests.kubernetes.api.store import Change, Store
from tests.kubernetes.api.verbs import Verbs

BOOKMARK_SECONDS = 5.0
LONGEST_SECONDS = 600.0


class Watch:
    def __init__(self, store: Store, verbs: Verbs, request: Request, target: Target):
        self._store = store
        self._request = request
        self._target = target
        self._labels: Test = label_test(request.query.get("labelSelector", ""))
        self._fields: Test = field_test(request.query.get("fieldSelector", ""))
        self._verbs = verbs

    async def events(self, closing: asyncio.Event) -> AsyncIterator[bytes]:
        """Lines of JSON, until the client's timeout or the server's end."""
        loop = asyncio.get_running_loop()
        woken = asyncio.Event()
        unsubscribe = self._store.subscribe(lambda: _wake(loop, woken))
        try:
            async for line in self._events(closing, woken):
                yield line
        except ApiError as error:
            yield _line("ERROR", error.status())
        finally:
            unsubscribe()

    async def _events(self, closing: asyncio.Event, woken: asyncio.Event) -> AsyncIterator[bytes]:
        seconds = float(self._request.query.get("timeoutSeconds") or LONGEST_SECONDS)
        deadline = time.monotonic() + seconds
        lines, revision = self._start()
        bookmark_due = time.monotonic() + BOOKMARK_SECONDS
        while True:
            for line in lines:
                yield line
            now = time.monotonic()
            if closing.is_set() or now >= deadline:
                return
            if now >= bookmark_due and self._request.flag("allowWatchBookmarks"):
                yield self._bookmark(revision)
                bookmark_due = now + BOOKMARK_SECONDS
            try:
                await asyncio.wait_for(woken.wait(), max(0.0, min(0.5, deadline - now)))
            except TimeoutError:
                lines = []
                continue
            woken.clear()
            changes = self._store.changes_since(revision)
            lines = [line for change in changes if (line := self._event(change))]
            revision = changes[-1].revision if changes else revision

    def _start(self) -> tuple[list[bytes], int]:
        query = self._request.query
        wanted = query.get("resourceVersion", "")
        initial = self._request.flag("sendInitialEvents")
        if not initial and wanted not in ("", "0"):
            revision = int(wanted)
            changes = self._store.changes_since(revision)
            lines = [line for change in changes if (line := self._event(change))]
            return lines, changes[-1].revision if changes else revision
        listed = self._verbs.listed(self._request, self._target)
        revision = int(listed["metadata"]["resourceVersion"])
        lines = [_line("ADDED", one) for one in listed["items"]]
        if initial:
            lines.append(self._bookmark(revision, end_of_initial=True))
        return lines, revision

    def _bookmark(self, revision: int, *, end_of_initial: bool = False) -> bytes:
        meta: Object = {"resourceVersion": str(revision), "creationTimestamp": None}
        if end_of_initial:
            meta["annotations"] = {"k8s.io/initial-events-end": "true"}
        kind = self._target.kind
        return _line("BOOKMARK", {"apiVersion": kind.api_version, "kind": kind.name, "metadata": meta})

    def _event(self, change: Change) -> bytes:
        """Empty where the change does not concern the target. What stops matching is deleted to the watcher."""
        target = self._target
        if change.key.kind != target.kind or target.namespace not in ("", change.key.namespace):
            return b""
        if target.name and change.key.name != target.name:
            return b""
        before = change.before is not None and self._matches(change.before)
        after = change.what != "DELETED" and self._matches(change.after)
        if not before and not after:
            return b""
        what = "MODIFIED" if before and after else "ADDED" if after else "DELETED"
        return _line(what, change.after)

    def _matches(self, document: Object) -> bool:
        return self._labels(document) and self._fields(document)


def _line(what: str, document: Object) -> bytes:
    return json.dumps({"type": what, "object": document}).encode() + b"\n"


def _wake(loop: asyncio.AbstractEventLoop, woken: asyncio.Event) -> None:
    if not loop.is_closed():
        loop.call_soon_threadsafe(woken.set)
