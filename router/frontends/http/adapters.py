"""Administrators' calls that load and unload adapters at all workers, in the form that vLLM has them."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import orjson
import redis
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response

from cluster.config.adapters import MAX_NAME, NAME_FORM, is_adapter_name
from cluster.errors import (
    AdapterRefusedError,
    CancelledError,
    DeadlineError,
    InvalidRequestError,
    RequestTooLargeError,
    UnavailableError,
    UnknownModelError,
)
from cluster.membership import adapter_refusals
from cluster.membership.types import Lease, WorkerInfo
from cluster.membership.wanted_adapters import Wanted, check_path
from cluster.protocol.times import REFRESH_SECONDS
from router.gateway import RequestGateway
from router.request.limits import MAX_SHOWN

log = logging.getLogger(__name__)
LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
MAX_BODY_BYTES = 16 << 10
WAIT_SECONDS = 60.0  # for the workers
POLL_SECONDS = 0.25
REDIS_SECONDS = 1.0  # for one answer, while workers are waited for
# For other routers, and processes of this one, to read what this one has seen: a client's next request may go there
SPREAD_SECONDS = 2 * REFRESH_SECONDS
# Of vLLM's calls, which its clients write out; by these schemas they change nothing
VLLM_FIELDS: Mapping[str, dict[str, Any]] = {
    "load_inplace": {"enum": [False, None], "description": "vLLM's: unload the adapter first"},
    "lora_int_id": {"type": ["integer", "null"], "description": "vLLM's, changes nothing"},
}


class AdapterCalls:
    def __init__(self, gateway: RequestGateway):
        self._gateway = gateway

    async def load(self, request: Request) -> Response:
        """Answers once every worker of the model has loaded it and routers have had time to see that, or as soon as one
        has refused; then none keeps it."""
        body = await _read(request, ("lora_name", "lora_path"), ("model",))
        name, gateway = body["lora_name"], self._gateway
        if not is_adapter_name(name):
            raise InvalidRequestError(f"lora_name: {NAME_FORM}", field="lora_name")
        path, model = check_path(body["lora_path"]), self._model(body.get("model"))
        self._check_free(name)
        await gateway.services.members.refresh_status()
        if not self._live([model]):
            raise UnavailableError(f"no worker of {model!r} is available to load it", retry_after_seconds=1.0)
        self._check_directories(model)
        try:
            wanted = await gateway.services.wanted_adapters.add(name, path, self._registered(model))
        except (redis.RedisError, OSError) as error:
            raise UnavailableError("Redis does not answer", retry_after_seconds=1.0) from error
        try:
            await self._wait(
                lambda: self._live([model]),
                lambda worker: name in dict(worker.adapters),
                f"have loaded {name!r}",
                lambda: self._check_wanted(name, wanted),
                lambda worker: _check_not_refused(worker, name, wanted),
                least=1,
            )
        except AdapterRefusedError:
            await self._take_back(name, wanted)
            raise
        self._check_one_digest(model, name)
        loaded = gateway.model(model).validator.limits.adapters()
        return JSONResponse({"id": name, "digest": loaded.get(name, "")})

    def _check_directories(self, model: str) -> None:
        """Raises AdapterRefusedError where a worker takes no adapters from calls: waiting would not help."""
        for worker in self._live([model]):
            if worker.status.takes_adapters == 0:
                raise AdapterRefusedError(
                    f"lora_dir: worker {worker.worker_id} is started without it and loads those of its setting lora "
                    "only",
                    field="lora_dir",
                )

    async def _take_back(self, name: str, wanted: Wanted) -> None:
        """Remove an entry: else calls for the name would be refused, and workers would try again. A later entry of the
        same name stays."""
        try:
            await self._gateway.services.wanted_adapters.remove(name, wanted)
        except (redis.RedisError, OSError):
            log.warning("adapter %s, which a worker has refused, stays wanted: Redis does not answer", name)

    async def _check_wanted(self, name: str, wanted: Wanted) -> bool:
        """False, as long as workers are to load it. Raises AdapterRefusedError once another call has unloaded it: no
        worker says so, and one that has the name may have it of a later call."""
        try:
            found = await self._found(name)
        except (redis.RedisError, OSError):
            return False  # workers may load it all the same
        if found is None or found.tag != wanted.tag:
            raise AdapterRefusedError(
                f"lora_name: another call has unloaded {name!r} before this one was done", field="lora_name"
            )
        return False

    async def _is_wanted(self, name: str) -> bool:
        """Whether, after it was unloaded, another call loads an adapter under its name: workers may not give that up."""
        try:
            return await self._found(name) is not None
        except (redis.RedisError, OSError):
            return False

    async def _found(self, name: str) -> Wanted | None:
        """The adapter's entry in Redis now. Raises redis.RedisError, OSError."""
        async with asyncio.timeout(REDIS_SECONDS):
            return await self._gateway.services.wanted_adapters.find(name)

    def _check_free(self, name: str) -> None:
        """Raises InvalidRequestError if requests may name a model or an adapter so: they would not lead to this one."""
        served = [one.validator.limits for one in self._gateway.models]
        if name in served[0].accepted_names or any(limits.keeps(name) for limits in served):
            raise InvalidRequestError(
                f"lora_name: {name!r} is served already: choose another name, or unload that adapter first",
                field="lora_name",
            )

    def _check_one_digest(self, model: str, name: str) -> None:
        """Raises UnavailableError where workers have different files there: requests would meet some of them only."""
        found = {dict(worker.adapters).get(name) for worker in self._live([model])} - {None}
        if len(found) > 1:
            raise UnavailableError(
                f"lora_path: workers have {len(found)} different adapters there; unload {name!r}, and load it once the "
                "files are the same",
                field="lora_path",
            )

    async def unload(self, request: Request) -> Response:
        """Answers once no worker is registered with it and routers have had time to see that; running requests go on."""
        body = await _read(request, ("lora_name",), ("model",))
        name, entries = body["lora_name"], self._gateway.services.wanted_adapters
        asked = self._model(body["model"]) if "model" in body else None
        try:
            found = await entries.find(name)
            models = self._models_of(found)
            known = (asked is None or asked in models) and await entries.remove(name, found)
        except (redis.RedisError, OSError) as error:
            raise UnavailableError("Redis does not answer", retry_after_seconds=1.0) from error
        if not known:
            of = f" of {asked!r}" if asked is not None else ""
            raise UnknownModelError(
                f"lora_name: no adapter{of} of this name was loaded by a call; those of the workers' settings stay",
                field="lora_name",
            )
        await self._gateway.services.members.refresh_status()
        # None: the model has no workers, or it was another router's, which sees those workers. A suspect one may come back
        await self._wait(
            lambda: self._live(models, ("live", "suspect")),
            lambda worker: name not in dict(worker.adapters),
            f"have given up {name[:MAX_NAME]!r}",
            lambda: self._is_wanted(name),
        )
        return JSONResponse({"id": name})

    def _model(self, asked: str | None) -> str:
        """The name of the model that a call is about, which may name an alias. Raises InvalidRequestError where it names
        none of several, UnknownModelError."""
        config = self._gateway.config
        served = ", ".join(map(repr, config.model_names))
        if asked is None:
            if config.models:
                raise InvalidRequestError(
                    f"model: name one of {served}, which this router serves", field="model"
                )
            return config.served_name
        for name, own in config.by_model().items():
            if asked in (name, *own.model_aliases):
                return name
        are = "are" if config.models else "is"
        raise UnknownModelError(
            f"model: {asked[:MAX_SHOWN]!r} is not served here; {served} {are}", field="model"
        )

    def _registered(self, model: str) -> tuple[str, ...]:
        """With which names its workers register: none is the first model's. With one model, too: workers of a second one
        would load the adapter as well, and answer for it once the first one's are away."""
        return (model, "") if model == self._gateway.config.served_name else (model,)

    def _models_of(self, wanted: Wanted | None) -> list[str]:
        """This router's models whose workers load it."""
        names = self._gateway.config.model_names
        if wanted is None or not wanted.serving:
            return [*names]
        return [name for name in names if {*self._registered(name)} & {*wanted.serving}]

    def _live(self, models: Sequence[str], leases: Sequence[Lease] = ("live",)) -> Sequence[WorkerInfo]:
        """Workers of these models that are ready."""
        services = self._gateway.services
        ready = [one for one in services.members.all if one.state == "ready" and one.lease in leases]
        serves = services.placement.eligibility.serves
        return [one for one in ready if any(serves(one, model) for model in models)]

    async def _wait(
        self,
        of: Callable[[], Sequence[WorkerInfo]],
        done: Callable[[WorkerInfo], bool],
        what: str,
        is_over: Callable[[], Awaitable[bool]],
        check: Callable[[WorkerInfo], None] = lambda worker: None,
        least: int = 0,
    ) -> None:
        """Wait until all workers are done, and as many as `least`, and other routers have had time to see that; or
        `is_over`, because of another call. `check`: of workers that are not done. Raises DeadlineError, and what these
        two do."""
        deadline = time.monotonic() + WAIT_SECONDS
        while True:
            workers = of()
            count = sum(map(done, workers))
            if await is_over():
                return
            if least <= count == len(workers):
                await asyncio.sleep(SPREAD_SECONDS if workers else 0.0)
                return
            for worker in workers:
                if not done(worker):
                    check(worker)
            if time.monotonic() > deadline:
                raise DeadlineError(
                    f"{count} of {len(workers)} workers {what} within {WAIT_SECONDS:.0f} s; adapters_refused in their "
                    "status at /v1/cluster says why the others have not",
                    limit=f"{WAIT_SECONDS:.0f} s",
                )
            await asyncio.sleep(POLL_SECONDS)
            await self._gateway.services.members.refresh_status()


def _check_not_refused(worker: WorkerInfo, name: str, wanted: Wanted) -> None:
    """Raises AdapterRefusedError, unless the worker tries again until it may load it."""
    refusal = adapter_refusals.decode(worker.status.adapters_refused).get(name)
    if refusal is not None and refusal.tag == wanted.tag and refusal.final:
        raise AdapterRefusedError(
            f"worker {worker.worker_id} does not load {name!r}: {refusal.message}", field=refusal.field
        )


async def _read(
    request: Request, names: tuple[str, ...], optional: tuple[str, ...] = ()
) -> Mapping[str, str]:
    """The fields of the body, all text; an optional one may be null. Raises InvalidRequestError,
    RequestTooLargeError, CancelledError."""
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
    given = [*names, *(name for name in optional if body.get(name) is not None)]
    for name in given:
        if not isinstance(body.get(name), str):
            raise InvalidRequestError(f"{name}: is missing, or no text", field=name)
    further = body.keys() - {*names, *optional}
    if unknown := sorted(name for name in further if not _changes_nothing(name, body[name])):
        name = unknown[0][:MAX_SHOWN]
        raise InvalidRequestError(f"{name}: is not a field of this call, or not with this value", field=name)
    return {name: body[name] for name in given}


def _changes_nothing(name: str, value: object) -> bool:
    if name == "load_inplace":
        return value is None or value is False
    return name == "lora_int_id" and isinstance(value, int | None) and not isinstance(value, bool)
