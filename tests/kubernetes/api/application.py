"""The ASGI application: routes paths to handlers."""

from __future__ import annotations

import asyncio
import json
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from tests.kubernetes.api import discovery
from tests.kubernetes.api.access import Access
from tests.kubernetes.api.errors import ApiError, not_found
from tests.kubernetes.api.kinds import Object
from tests.kubernetes.api.objects import Objects
from tests.kubernetes.api.request import Request, Target, find_target
from tests.kubernetes.api.verbs import Verbs, action_of
from tests.kubernetes.api.watch import Watch

Send = Callable[[Mapping[str, Any]], Awaitable[None]]
Receive = Callable[[], Awaitable[Mapping[str, Any]]]
Logs = Callable[[str, str, str], bytes]
REMEMBERED = 2000


def no_logs(namespace: str, name: str, container: str) -> bytes:
    return b""


class Application:
    def __init__(self, objects: Objects, access: Access):
        self._objects = objects
        self._access = access
        self._verbs = Verbs(objects, access)
        self.logs: Logs = no_logs
        self.requests: deque[Request] = deque(maxlen=REMEMBERED)
        self.closing = asyncio.Event()

    async def __call__(self, scope: Mapping[str, Any], receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        request = Request.of(scope, await _body(receive))
        self.requests.append(request)
        try:
            await self._route(request, send)
        except ApiError as error:
            await _send_json(send, error.code, error.status())

    async def _route(self, request: Request, send: Send) -> None:
        parts = [part for part in request.path.split("/") if part]
        if parts and parts[0] in ("healthz", "livez", "readyz"):
            await _send(send, 200, "text/plain", b"ok")
        elif parts[:2] == ["openapi", "v2"]:
            # Empty is a valid document to clients; ours validates by itself.
            await _send(send, 200, "application/octet-stream", b"")
        elif parts[:2] == ["openapi", "v3"]:
            await _send_json(send, 200, {"paths": {}})
        elif (found := self._discovery(parts)) is not None:
            await _send_json(send, 200, found)
        else:
            await self._serve(request, self._target(parts), send)

    def _discovery(self, parts: list[str]) -> Object | None:
        kinds = self._objects.kinds
        match parts:
            case ["version"]:
                return discovery.version()
            case ["api"]:
                return discovery.core_versions()
            case ["apis"]:
                return discovery.groups(kinds)
            case ["api", version]:
                return discovery.resources(kinds, version)
            case ["apis", group]:
                return discovery.group(kinds, group)
            case ["apis", group, version]:
                return discovery.resources(kinds, f"{group}/{version}")
        return None

    def _target(self, parts: list[str]) -> Target:
        match parts:
            case ["api", version, *rest] if rest:
                return find_target(self._objects.kinds, version, rest)
            case ["apis", group, version, *rest] if rest:
                return find_target(self._objects.kinds, f"{group}/{version}", rest)
        raise not_found("paths", "/".join(parts))

    async def _serve(self, request: Request, target: Target, send: Send) -> None:
        self._access.check(request.token, action_of(request, target))
        if request.method == "GET" and request.flag("watch"):
            await self._watch(Watch(self._objects.store, self._verbs, request, target), send)
        elif target.subresource == "log":
            pod = self._objects.get(target.kind, target.namespace, target.name)
            container = request.query.get("container") or pod["spec"]["containers"][0]["name"]
            text = await asyncio.to_thread(self.logs, target.namespace, target.name, container)
            await _send(send, 200, "text/plain", text)
        else:
            await _send_json(send, *self._verbs.answer(request, target))

    async def _watch(self, watch: Watch, send: Send) -> None:
        await send(_head(200, "application/json"))
        async for line in watch.events(self.closing):
            await send({"type": "http.response.body", "body": line, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _body(receive: Receive) -> bytes:
    parts = []
    while True:
        message = await receive()
        parts.append(message.get("body", b""))
        if not message.get("more_body"):
            return b"".join(parts)


def _head(status: int, content_type: str) -> Mapping[str, Any]:
    headers = [(b"content-type", content_type.encode())]
    return {"type": "http.response.start", "status": status, "headers": headers}


async def _send(send: Send, status: int, content_type: str, body: bytes) -> None:
    await send(_head(status, content_type))
    await send({"type": "http.response.body", "body": body})


async def _send_json(send: Send, status: int, document: Object) -> None:
    await _send(send, status, "application/json", json.dumps(document).encode())
