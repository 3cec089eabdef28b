"""Administrators' calls that load and unload adapters at all workers, in the form that vLLM has them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import orjson
import redis
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response

from cluster.config.adapters import MAX_NAME, is_adapter_name
from cluster.errors import (
    CancelledError,
    DeadlineError,
    InvalidRequestError,
    RequestTooLargeError,
    UnavailableError,
    UnknownModelError,
)
from cluster.membership.types import WorkerInfo
from cluster.membership.wanted_adapters import check_path
from router.gateway import RequestGateway

LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
MAX_BODY_BYTES = 16 << 10
WAIT_SECONDS = 60.0  # for the workers
LOOK_SECONDS = 0.25


class AdapterCalls:
    def __init__(self, gateway: RequestGateway):
        self._gateway = gateway

    async def load(self, request: Request) -> Response:
        """Answers once every worker of the first model has loaded it. Workers of other models refuse what does not fit."""
        body = await _read(request, ("lora_name", "lora_path"))
        name, limits = body["lora_name"], self._gateway.first.validator.limits
        if not is_adapter_name(name):
            raise InvalidRequestError(
                f"lora_name: letters, digits and . _ / : - (at most {MAX_NAME})", field="lora_name"
            )
        path = check_path(body["lora_path"])
        self._check_free(name)
        try:
            await self._gateway.services.wanted_adapters.add(name, path)
        except (redis.RedisError, OSError) as error:
            raise UnavailableError("Redis does not answer", retry_after_seconds=1.0) from error
        await self._wait(lambda worker: name in dict(worker.adapters), f"have loaded {name!r}")
        self._check_one_digest(name)
        return JSONResponse({"id": name, "digest": limits.adapters().get(name, "")})

    def _check_free(self, name: str) -> None:
        """Raises InvalidRequestError if requests may name a model or an adapter so: they would lead to this one."""
        served = [one.validator.limits for one in self._gateway.models]
        if name in served[0].accepted_names or any(name in limits.adapters() for limits in served):
            raise InvalidRequestError(f"lora_name: {name!r} is served already", field="lora_name")

    def _check_one_digest(self, name: str) -> None:
        """Raises UnavailableError where workers have different files there: requests would meet some of them only."""
        found = {dict(worker.adapters).get(name) for worker in self._live} - {None}
        if len(found) > 1:
            raise UnavailableError(
                f"lora_path: workers have {len(found)} different adapters there; unload {name!r}, and load it once the "
                "files are the same",
                field="lora_path",
            )

    async def unload(self, request: Request) -> Response:
        """Answers once no worker takes requests for it; its running requests go on."""
        name = (await _read(request, ("lora_name",)))["lora_name"]
        try:
            known = await self._gateway.services.wanted_adapters.remove(name)
        except (redis.RedisError, OSError) as error:
            raise UnavailableError("Redis does not answer", retry_after_seconds=1.0) from error
        if not known:
            raise UnknownModelError(
                "lora_name: no adapter of this name was loaded by a call; those of the workers' settings stay",
                field="lora_name",
            )
        await self._wait(
            lambda worker: name not in dict(worker.adapters), f"have given up {name[:MAX_NAME]!r}"
        )
        return JSONResponse({"id": name})

    @property
    def _live(self) -> Sequence[WorkerInfo]:
        """Workers of the first model, whose adapters these calls are about."""
        services, first = self._gateway.services, self._gateway.config.served_name
        ready = [one for one in services.members.all if (one.state, one.lease) == ("ready", "live")]
        return [one for one in ready if services.placement.eligibility.serves(one, first)]

    async def _wait(self, done: Callable[[WorkerInfo], bool], what: str) -> None:
        """Raises DeadlineError, UnavailableError."""
        self._gateway.services.check_any_worker()
        deadline = time.monotonic() + WAIT_SECONDS
        while True:
            workers = self._live
            count = sum(map(done, workers))
            if workers and count == len(workers):
                return
            if time.monotonic() > deadline:
                raise DeadlineError(
                    f"{count} of {len(workers)} workers {what} within {WAIT_SECONDS:.0f} s; adapters_refused in their "
                    "status at /v1/cluster says why the others have not",
                    limit=f"{WAIT_SECONDS:.0f} s",
                )
            await asyncio.sleep(LOOK_SECONDS)


async def _read(request: Request, names: tuple[str, ...]) -> Mapping[str, str]:
    """The fields of the body, all text. Raises InvalidRequestError, RequestTooLargeError, CancelledError."""
    raw = bytearray()
    try:
        async for piece in request.stream():
            raw += piece
            if len(raw) > MAX_BODY_BYTES:
                raise RequestTooLargeError(
                    f"the body exceeds {MAX_BODY_BYTES} bytes", field="body", limit=str(MAX_BODY_BYTES)
                )
    except ClientDisconnect:
        raise CancelledError("the client disconnected") from None
    try:
        body: Any = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        raise InvalidRequestError(f"the body is not valid JSON: {error}", field="body") from None
    if not isinstance(body, dict):
        raise InvalidRequestError("the body must be a JSON object", field="body")
    for name in names:
        if not isinstance(body.get(name), str):
            raise InvalidRequestError(f"{name}: is missing, or no text", field=name)
    if unknown := body.keys() - set(names):
        raise InvalidRequestError(f"{sorted(unknown)[0][:80]}: is not a field of this call", field="body")
    return {name: body[name] for name in names}
