"""Common parts of the HTTP and the gRPC endpoint: validation, admission, and the measuring of every request."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from cluster.errors import CancelledError, DeadlineError, ForbiddenError, InvalidRequestError, OverloadedError
from cluster.protocol.times import RAY_HEAD_SILENT_SECONDS
from cluster.security.key_file import ApiKeys
from cluster.security.keys import ANYONE, Caller, RateLimits
from router.admission.admission import Admission, Place
from router.admission.low_priority import LowPriority
from router.dispatch.dispatcher import RequestDispatcher
from router.dispatch.services import Identity, Services
from router.observe.live.live import Live
from router.observe.live.report import Counts, RouterReport, RouterState
from router.observe.requests import RouterMetrics
from router.observe.traces import Arrival
from router.processes.member import Member
from router.quota.quota import Use
from router.request.adapters import ModelAdapters
from router.request.answer_plan import ChatPrompt
from router.request.completion import Completion, prefix_scope
from router.request.grammar.requested import RequestedGrammar
from router.request.permissions import check_model_allowed
from router.request.served_model import ServedModel, further_models
from router.request.tool_schemas import checked_plan
from router.text.contents import Rendered
from router.text.conversation import Conversation

T = TypeVar("T")


class RequestGateway:
    further: Mapping[str, ServedModel] = {}  # models beside the first, by their names and aliases
    member: Member | None = None  # of the router's processes; None: there is one

    def __init__(
        self, services: Services, metrics: RouterMetrics, keys: ApiKeys, member: Member | None = None
    ):
        self.services = services
        self.config = services.config
        served_name = services.config.served_name
        self.first = ServedModel.of(services.config, services.text, self._adapters_of(served_name))
        self.further = further_models(services.config, services.further_texts, self._adapters_of)
        self.created_unix_seconds = int(time.time())
        self.started = time.monotonic()
        self.metrics = metrics
        self.keys = keys
        self.low_priority = LowPriority()
        self.member = member
        tallies = member.tallies() if member is not None else None
        self.admission = Admission(services.config, metrics.overloaded, tallies)
        metrics.in_flight.set_function(lambda: self.admission.in_flight)
        for name in services.config.model_names:
            metrics.of_models.labels(name).set_function(partial(self.admission.in_model, name))
        self.draining = False  # not ready: load balancers should send no new requests
        self.requests = 0
        self.live = Live(services, metrics, self._report)

    def enter_model(self, place: Place, caller: Caller, asked: Any) -> None:
        """Count a request as one of the model that it names. A name that is none of this router's is refused later, with
        its field. Raises UnknownModelError for a model that the caller's key does not allow, OverloadedError."""
        model = self._allowed(caller, asked)
        if model is None:
            place.leave_model()
        else:
            self.take_of_model(place, caller, model.name)

    def take_of_model(self, place: Place, caller: Caller, model: str) -> None:
        """Count a request as one of a model of this router; "" = of none. Raises OverloadedError."""
        try:
            place.of_model(model)
        except OverloadedError:
            self.metrics.overloaded(caller.tenant, model)
            raise

    def admit_further(
        self, held: contextlib.ExitStack, place: Place, caller: Caller, connection: str, count: int
    ) -> None:
        """Take, until `held` closes, a place for each further prompt of a request. Raises OverloadedError."""
        for _ in range(count):
            further = held.enter_context(self.admission.admit(caller, connection))
            self.take_of_model(further, caller, place.model)

    async def expect_model(
        self, place: Place, caller: Caller, hint: str, is_right: Callable[[], bool]
    ) -> str:
        """Count a request, before it is parsed, as one of the model that it seems to name, and return that model's name.
        "": it is none of this router's, or none of the key's, whose places a request never takes. `is_right`: whether the
        request does name it.

        Raises OverloadedError, only where the hint is right.
        """
        model = self._found(hint)
        if model is None or not caller.may_name(model.validator.limits.named(hint)):
            return ""
        try:
            place.of_model(model.name)
        except OverloadedError:
            if is_right():
                self.metrics.overloaded(caller.tenant, model.name)
                place.leave()  # the wait is not for what others may need
                await self.low_priority.refuse(caller.tenant)
                raise
        return model.name

    def _found(self, asked: Any) -> ServedModel | None:
        """The model of a name, or of an adapter's; the first one for "". None: there is none."""
        if not isinstance(asked, str):
            return None
        model = self.model(asked)
        return model if model.validator.limits.serves(asked) else None

    def _allowed(self, caller: Caller, asked: Any) -> ServedModel | None:
        """As _found. Raises UnknownModelError for what the caller's key does not allow, served here or not."""
        asked = "" if asked is None else asked
        model = self._found(asked)
        if caller.models and isinstance(asked, str):
            limits = (model or self.first).validator.limits
            check_model_allowed(caller, asked, limits.named(asked) if limits.may_name(asked) else "")
        return model

    def model(self, name: Any) -> ServedModel:
        """The model that a request names, by its own name or an adapter's: one whose workers have or had the adapter
        before one whose workers are to load it. The first for no name, and for an unknown one, which its limits refuse."""
        if not self.further or not isinstance(name, str):
            return self.first
        if (found := self.further.get(name)) is not None:
            return found
        serving = [one for one in self.models if one.validator.limits.serves(name)] or [self.first]
        return next((one for one in serving if one.validator.limits.keeps(name)), serving[0])

    def _adapters_of(self, model: str) -> ModelAdapters:
        """The adapters that the model's workers have loaded, or are to load."""
        # Workers without a name serve the first model
        registered = (model, "") if model == self.config.served_name else (model,)
        return ModelAdapters(
            lambda: self.services.members.all,
            lambda one: self.services.placement.eligibility.serves(one, model),
            lambda: self.services.wanted_adapters.wanted,
            lambda one: any(map(one.is_for, registered)),
        )

    @property
    def models(self) -> list[ServedModel]:
        """All of them, the first before the others."""
        return [self.first, *dict.fromkeys(self.further.values())]

    def check_message(self, size: int) -> None:
        """Refuse a message of so many bytes, before it is parsed, if no model's context takes as long a request.

        Raises ContextLengthError.
        """
        if not any(one.validator.takes_message(size) for one in self.further.values()):
            self.first.validator.check_message(size)

    async def encode(
        self,
        given: str | Rendered,
        *,
        model: str = "",
        special: bool = True,
        truncated: bool = False,
        tenant: str = "",
        cache_salt: str = "",
        field: str = "prompt",
    ) -> list[int]:
        """Tokenise a prompt, which is the client's `field`. Raises ContextLengthError or InvalidRequestError before
        tokenising a text that is too long; one that will be `truncated` may exceed the context. Raises DeadlineError."""
        asked = self.model(model)
        text = given if isinstance(given, str) else given.text
        asked.validator.check_text(text, truncated=truncated, field=field)
        scope = self._prefix_scope(tenant, cache_salt)
        work = asked.text.encode(given, special=special, tenant=tenant, scope=scope)
        return await self.in_time(work, field)

    async def converse(
        self,
        read: Callable[[], Conversation],
        characters: int,
        asked: RequestedGrammar | None = None,
        *,
        model: str = "",
        truncated: bool = False,
        tenant: str = "",
        cache_salt: str = "",
        field: str = "messages",
        answered: bool = True,
    ) -> ChatPrompt:
        """Render, plan and tokenise the conversation that `read` returns (ModelText.chat), whose answer must match the
        grammar that was `asked` for.

        Raises ContextLengthError or InvalidRequestError before special tokens are searched in texts that are too long, and
        for tools and grammars that the model does not support; DeadlineError. Errors of the whole conversation name the
        client's `field`. Not `answered`: only the prompt is wanted, and no grammar is made.
        """

        served = self.model(model)

        def checked() -> Conversation:
            conversation = read()
            served.validator.check_contents(conversation.characters, truncated=truncated, field=field)
            return conversation

        chat = served.text.chat(checked, characters, tenant=tenant)
        conversation, rendered = await self.in_time(chat, field)
        plan = await checked_plan(served, tenant, conversation, rendered.text, asked, answered=answered)
        tokens = await self.encode(
            rendered,
            model=model,
            special=False,
            truncated=truncated,
            tenant=tenant,
            cache_salt=cache_salt,
            field=field,
        )
        return ChatPrompt(tokens, plan, field)

    async def lengths(
        self, read: Callable[[], Sequence[str]], characters: int, *, model: str = "", tenant: str = ""
    ) -> list[int]:
        """The tokens of each text that `read` returns (ModelText.lengths). Raises DeadlineError."""
        return await self.in_time(self.model(model).text.lengths(read, characters, tenant=tenant), "messages")

    async def decode(
        self, tokens: Sequence[int], *, model: str = "", tenant: str = "", field: str = "prompt"
    ) -> str:
        """The text of token ids, which the client's `field` has. Raises DeadlineError."""
        return await self.in_time(self.model(model).text.decode(tokens, tenant=tenant), field)

    async def in_time(self, work: Awaitable[T], field: str) -> T:
        """Raises DeadlineError where the threads are not free, or not done, within `request_seconds`."""
        seconds = self.config.request_seconds
        try:
            async with asyncio.timeout(seconds):
                return await work
        except TimeoutError:
            late = f"{field}: it was not tokenised within {seconds:g} s (request_seconds)"
            raise DeadlineError(late, field=field, limit=f"{seconds:g} s") from None

    def preparing(
        self, caller: Caller, model: str = "", *, resumed: bool = False, costly: bool = True
    ) -> contextlib.AbstractAsyncContextManager[None]:
        """Enter before a prompt is tokenised, and leave once its request is checked: one that is refused, or whose client
        leaves, meanwhile counts as a request of the tenant's quota. A tenant whose requests are used up, in all or for
        `model`, does not enter, but with a request that is `resumed` and whose ticket `check_ticket` then finds valid
        (Quota.check_resumed). Where nothing is `costly`, made-up tickets need no bound. Raises OverloadedError."""
        if not caller.tenant:
            return contextlib.nullcontext()
        return self._preparing(caller, model, resumed=resumed, costly=costly)

    @contextlib.asynccontextmanager
    async def _preparing(
        self, caller: Caller, model: str, *, resumed: bool, costly: bool
    ) -> AsyncIterator[None]:
        quota, buckets = self.services.quota, self._buckets(caller, model)
        async with contextlib.AsyncExitStack() as held:
            if resumed and costly:
                wait = self.config.request_seconds
                await held.enter_async_context(quota.check_resumed(caller.tenant, buckets, wait))
            elif not resumed:
                for limits, of_model in buckets:
                    quota.check(caller.tenant, limits, of_model)
            try:
                yield
            except (InvalidRequestError, ForbiddenError, CancelledError):
                async with self.counted(caller, model):
                    pass
                raise

    def check_ticket(self, completion: Completion, caller: Caller) -> Identity | None:
        """Check a resumed request's ticket: if it is valid, the tenant was charged before. Raises InvalidRequestError.
        None: without tenants it is checked when the request is dispatched."""
        if not caller.tenant:
            return None
        identity = self.services.identify(self._owned(completion, caller))
        if identity.resumed:
            self.services.quota.tickets.proven(caller.tenant)
        return identity

    def request(
        self,
        completion: Completion,
        caller: Caller = ANYONE,
        first_shown: int = 0,
        arrival: Arrival | None = None,
        identity: Identity | None = None,
    ) -> contextlib.AbstractContextManager[RequestDispatcher]:
        """Measure an admitted request, from its dispatch to its end. `identity`: that of `check_ticket`."""
        self.requests += 1
        if self.member is not None:
            self.member.count_request()
        owned = self._owned(completion, caller)
        dispatcher = RequestDispatcher(owned, self.services, first_shown, arrival, identity)
        return self.metrics.request(dispatcher)

    @contextlib.asynccontextmanager
    async def counted(self, caller: Caller, model: str) -> AsyncIterator[None]:
        """Charge the tenant's quotas, of all models and of this one, a request that no worker sees. Raises
        OverloadedError."""
        charges = []
        used: Use | None = None  # not served, until every quota had room
        try:
            for limits, of_model in self._buckets(caller, model):
                if caller.tenant and limits.requests_per_minute:
                    quota = self.services.quota
                    charges.append(await quota.charge(caller.tenant, limits, 0, model=of_model))
            used = Use(0, 0)
            yield
        finally:
            for charge in filter(None, charges):
                await self.services.quota.settle(charge, used)

    def _buckets(self, caller: Caller, model: str) -> tuple[tuple[RateLimits, str], ...]:
        """A tenant's limits, each with its model; "" = all."""
        return (self._rate_limits(caller), ""), (caller.limits_of(model).rate_limits, model)

    def leave(self) -> None:
        """Fail readiness probes from now on; new requests are still admitted."""
        self.draining = True
        self.beat()

    def beat(self) -> None:
        """Report to the router's other processes."""
        if self.member is not None:
            self.member.beat(self.why_not_ready(), draining=self.draining)

    def refuse_new(self, unaware: Collection[str] = ()) -> None:
        """Admit nothing more, but on `unaware`: connections whose clients could not know yet that this router leaves."""
        self.draining = True
        self.admission.close(unaware)

    def _owned(self, completion: Completion, caller: Caller) -> Completion:
        """The request with its tenant, on which depends with which requests it shares prefixes."""
        scope = self._prefix_scope(caller.tenant, completion.cache_salt)
        if not caller.tenant:
            return replace(completion, prefix_scope=scope) if scope else completion
        return replace(
            completion,
            tenant=caller.tenant,
            weight=caller.weight,
            rate_limits=self._rate_limits(caller),
            model_rate_limits=caller.limits_of(completion.served_model).rate_limits,
            prefix_scope=scope,
        )

    def _prefix_scope(self, tenant: str, cache_salt: str) -> str:
        return prefix_scope("" if self.config.share_prefixes_across_tenants else tenant, cache_salt)

    def _report(self, counts: Counts) -> RouterReport:
        state: RouterState = "draining" if self.draining else "ready" if self.ready() else "not ready"
        return RouterReport(state, time.monotonic() - self.started, self.admission.in_flight, counts)

    def _rate_limits(self, caller: Caller) -> RateLimits:
        """The key's own limits, else the router's."""
        own, config = caller.rate_limits, self.config
        return RateLimits(
            own.requests_per_minute or config.requests_per_minute_per_tenant or None,
            own.tokens_per_minute or config.tokens_per_minute_per_tenant or None,
        )

    def ready(self) -> bool:
        """Can a request be served now?"""
        return not self.why_not_ready()

    def why_not_ready(self) -> list[str]:
        """Why this process is not ready."""
        if self.draining:
            return ["draining: this router leaves"]
        missing = self.services.placement.eligibility.missing_role()
        return [f"no {missing} worker is available"] if missing else []

    def why_not_served(self) -> dict[str, str]:
        """Why models cannot be served now, by model. Empty for a router of one model."""
        missing = self.services.placement.eligibility.missing_roles() if self.config.models else {}
        return {model: f"no {role} worker is available" for model, role in missing.items()}

    def warnings(self) -> list[str]:
        """Problems that keep no request from being served, without addresses: `/ready` needs no key."""
        live = [one.status for one in self.services.members.all if one.lease == "live"]
        seconds = max((status.ray_head_silent_seconds or 0 for status in live), default=0)
        if seconds < RAY_HEAD_SILENT_SECONDS:
            return []
        return [
            f"Ray's head has not responded for {seconds:.0f} s: workers serve, but one that ends is not replaced"
        ]

    def why_router_not_ready(self) -> list[str]:
        """Why this router is not ready, over all its processes."""
        own = self.why_not_ready()
        return own if self.member is None else self.member.why_not_ready(own)
