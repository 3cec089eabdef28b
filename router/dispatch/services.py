"""The objects that all requests share: one `Services` per router process."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Coroutine, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from cluster.background_tasks import BackgroundTasks
from cluster.config.router import RouterConfig
from cluster.errors import UnavailableError
from cluster.faults.points import NO_FAULTS, FaultPoint, Faults, Point
from cluster.membership.known_adapters import WantedAdapters
from cluster.membership.reader import Members
from cluster.protocol.block_hash import make_salt, pack_tokens
from cluster.telemetry.metrics import router as metrics
from router.dispatch.channels import Channels
from router.dispatch.exclusions import WithoutAdapter
from router.dispatch.unreachable_pairs import UnreachablePairs
from router.dispatch.work_reports import WorkReports
from router.link.links import Links
from router.observe.live.report import Recorder
from router.observe.no_handoff import why_no_handoff
from router.observe.token_times import TokenTimes
from router.observe.traces import Arrival, RequestTrace
from router.placement.placement import Placement
from router.placement.types import PlacementRequest, Reason
from router.quota.quota import Quota
from router.request.completion import Completion
from router.request.resume_tickets import Tickets, name_of
from router.text.tokenizer import ModelText

if TYPE_CHECKING:
    from cluster.telemetry.tracing.spans import Tracing

MAX_SALTS = 4096  # kept, one per model and tenant


class RequestFaults(NamedTuple):
    """Points of a request at which faults can be injected."""

    placed: FaultPoint
    token: FaultPoint
    done: FaultPoint

    @classmethod
    def of(cls, faults: Faults) -> RequestFaults:
        points = (Point.ROUTER_PLACED, Point.ROUTER_TOKEN, Point.ROUTER_DONE)
        return cls(*map(faults.point, points))


class Identity(NamedTuple):
    """A request's packed prompt and its name, which is the same at every router of the deployment."""

    packed_prompt: bytes
    name: bytes | None  # None: nothing has needed it yet
    resumed: bool  # its ticket proves that another router had admitted it


class Services:
    def __init__(
        self,
        config: RouterConfig,
        text: ModelText,
        members: Members,
        placement: Placement,
        channels: Channels,
        links: Links,
        quota: Quota,
        tracing: Tracing | None = None,
        faults: Faults = NO_FAULTS,
        further_texts: Mapping[str, ModelText] | None = None,
    ):
        """`further_texts`: of the models beside the first, by name."""
        self.config = config
        self.text = text
        self.further_texts = further_texts or {}
        self.members = members
        self.placement = placement
        self.channels = channels
        self.links = links
        self.quota = quota
        self.wanted_adapters = WantedAdapters(config.redis_url, config.namespace)
        self.tickets = Tickets(config.secret, config.request_seconds)
        self._salts: dict[tuple[str, str, str], bytes] = {}
        self.pairs = UnreachablePairs()
        self.without_adapter = WithoutAdapter(lambda: members.all)
        self.recorder = Recorder()
        self.work_reports = WorkReports()
        self.faults = RequestFaults.of(faults)
        self.tracing = tracing
        self.inter_token_seconds = metrics.ITL.create_family()
        self._token_times = {
            name: TokenTimes(self.recorder, self.inter_token_seconds.of(name)) for name in config.model_names
        }
        self._cleanups = BackgroundTasks()

    def text_of(self, model: str) -> ModelText:
        """The tokenizer and templates of a model of this router."""
        return self.further_texts.get(model, self.text)

    def token_times_of(self, model: str) -> TokenTimes:
        """The token times of a model of this router."""
        return self._token_times.get(model) or self._token_times[self.config.served_name]

    def name_of(self, completion: Completion, packed_prompt: bytes) -> bytes:
        """The request's name at every router of the deployment."""
        model = completion.served_model
        further = model if model in self.further_texts else ""
        return name_of(completion.tenant, completion.request_id, packed_prompt, further)

    def identify(self, completion: Completion) -> Identity:
        """Pack a request's prompt and check its ticket, if it has one: some ms for a long prompt, so once per request.
        Raises InvalidRequestError."""
        packed = pack_tokens(completion.prompt_tokens)
        if not (completion.resume_ticket or completion.resume_tokens):
            return Identity(packed, None, False)
        name = self.name_of(completion, packed)
        return Identity(packed, name, self.tickets.check(completion, name))

    def begin_trace(self, arrival: Arrival, completion: Completion) -> RequestTrace | None:
        """None: requests are not traced here, or this one is not sampled."""
        if self.tracing is None:
            return None
        return RequestTrace.begin(self.tracing, arrival, completion)

    def new_transfer_id(self) -> bytes:
        return secrets.token_bytes(16)

    def no_handoff(self) -> str:
        """Why no request of this router had its KV handed over; empty if there is nothing to explain."""
        return why_no_handoff(self.placement.mode, self.placement.decided, self.members.all)

    def check_any_worker(self) -> None:
        """Raises UnavailableError before the first worker has registered."""
        if not self.members.all:
            raise UnavailableError("no worker is available", retry_after_seconds=1.0)

    def without_unreachable_pairs(self, request: PlacementRequest) -> PlacementRequest:
        """The request, excluding one of every two workers that do not reach each other."""
        if not self.pairs.any_unreachable:
            return request
        eligibility = self.placement.eligibility
        out = self.pairs.left_out(
            eligibility.usable("prefill", request), eligibility.usable("decode", request)
        )
        return replace(request, excluded={**request.excluded, **dict.fromkeys(out, Reason.UNREACHABLE)})

    def salt(self, model_id: str, prefix_scope: str, adapter: str = "") -> bytes:
        """The salt of a model's block hashes, for requests that share prefixes. `adapter`: its digest, so that KV never
        meets other weights under the same name."""
        key = (model_id, adapter, prefix_scope)
        known = self._salts.get(key)
        if known is None:
            if len(self._salts) >= MAX_SALTS:
                self._salts.clear()
            known = self._salts[key] = make_salt(model_id, adapter, prefix_scope)
        return known

    def clean_up(self, coroutine: Coroutine[Any, Any, Any]) -> None:
        """Run it to its end, also after the request: a client does not wait for it."""
        self._cleanups.spawn(coroutine)

    async def finish(self, seconds: float) -> None:
        await self._cleanups.wait(seconds)

    async def close(self) -> None:
        await self.links.close()
        await self.channels.close()
        await self.placement.close()
        await self.quota.close()
        await self.members.close()
        await self.wanted_adapters.close()
        if self.tracing is not None:
            await asyncio.to_thread(self.tracing.close)
        for text in (self.text, *self.further_texts.values()):
            text.close()
