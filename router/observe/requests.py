"""The router's metrics of requests."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter

from prometheus_client import CollectorRegistry, Counter

from cluster.errors import BatonError, CancelledError
from cluster.telemetry.histogram import Histogram, HistogramFamily
from cluster.telemetry.metrics import declaration
from cluster.telemetry.metrics import router as declared
from router.dispatch.dispatcher import RequestDispatcher
from router.observe.tenants import Tenant, Tenants, result_of
from router.request.completion import Outcome
from wire.inference_pb2 import Timings

_SECONDS = [field.name for field in Timings.DESCRIPTOR.fields if field.name.endswith("_seconds")]
_SECONDS.remove("total_seconds")
_STAGES = [name.removesuffix("_seconds") for name in _SECONDS]
_STAGES_OF = attrgetter(*_SECONDS)
_OUTCOMES = (
    *("ok", "cancelled", "overloaded", "refused"),
    *("InvalidRequestError", "OverloadedError", "UnavailableError", "DeadlineError", "InternalError"),
)
_RETRIES = (
    "PeerLostError",
    "BlocksExhaustedError",
    "UnavailableError",
    "StaleEpochError",
    "InternalError",
    "AdapterMissingError",
)
# Counted at the end of each request
_TOTALS: tuple[tuple[declaration.Counter, Callable[[Outcome], float]], ...] = (
    (declared.KV_SHIPPED_BYTES, lambda outcome: outcome.timings.kv_bytes_shipped),
    (declared.KV_NOT_SHIPPED_TOKENS, lambda outcome: outcome.timings.not_shipped_tokens),
    (declared.ATTEMPTS, lambda outcome: outcome.timings.attempts),
    (declared.PLACEMENT_CALLS, lambda outcome: outcome.timings.placement_calls),
)
# The same by model
_TOTALS_OF_MODEL: tuple[tuple[declaration.Counter, Callable[[Outcome], float]], ...] = (
    (declared.PROMPT_TOKENS, lambda outcome: outcome.usage.prompt_tokens),
    (declared.PREFIX_CACHE_HITS, lambda outcome: outcome.usage.cached_tokens),
    (
        declared.PREFIX_CACHE_QUERIES,
        lambda outcome: outcome.usage.prompt_tokens if outcome.timings.attempts else 0,
    ),
    (declared.GENERATION_TOKENS, lambda outcome: outcome.usage.completion_tokens),
)
_HISTOGRAMS = (
    *(declared.E2E, declared.TTFT, declared.TPOT),
    *(declared.REQUEST_PROMPT_TOKENS, declared.REQUEST_GENERATION_TOKENS),
)


class RouterMetrics:
    def __init__(self, registry: CollectorRegistry, models: Sequence[str] = ()):
        """`models`: the names of those that the router serves."""
        self.registry = registry
        self.tenants = Tenants()
        registry.register(self.tenants)
        series = [(model, outcome) for model in (*models, declared.UNKNOWN_MODEL) for outcome in _OUTCOMES]
        self.requests = declared.REQUESTS.create(registry, series)
        self.in_flight = declared.REQUESTS_IN_FLIGHT.create(registry)
        self.of_models = declared.MODEL_REQUESTS_IN_FLIGHT.create(registry)
        self.retries = declared.RETRIES.create(registry, _RETRIES)
        self._totals = [(metric.create(registry), read) for metric, read in _TOTALS]
        self._totals_of_model = [(metric.create(registry, models), read) for metric, read in _TOTALS_OF_MODEL]
        self.prompt_tokens, self.cached_tokens, *_ = (counter for counter, _ in self._totals_of_model)
        families = {one.name: one.create_family() for one in (declared.STAGES, *_HISTOGRAMS)}
        for family in families.values():
            registry.register(family)
        self._families = families
        self._by_model: dict[str, _OfModel] = {}
        for model in models:
            self.of_models.labels(model)
            self._of(model)

    def refused(self, model: str = declared.UNKNOWN_MODEL) -> None:
        """A request was refused by what its key allows."""
        self.requests.labels(model, "refused").inc()

    def overloaded(self, tenant: str, model: str = "") -> None:
        """A request was refused by a limit of requests in flight or of bytes. `model`: "" before its body is read."""
        self.requests.labels(model or declared.UNKNOWN_MODEL, "overloaded").inc()
        self.tenants.of(tenant).requests["refused"] += 1

    @contextlib.contextmanager
    def request(self, dispatcher: RequestDispatcher) -> Iterator[RequestDispatcher]:
        """Measure it meanwhile."""
        began = time.monotonic()
        tenant = self.tenants.of(dispatcher.tenant)
        tenant.in_flight += 1
        outcome = ""
        try:
            yield dispatcher
        except CancelledError:  # its client has left, or reads nothing: no failure of the cluster
            raise
        except BatonError as error:
            outcome = type(error).__name__
            raise
        finally:
            # A client that has its last token may go before the end of the call has reached it: nothing was cancelled.
            outcome = outcome or _outcome(dispatcher)
            tenant.in_flight -= 1
            tenant.requests[result_of(outcome)] += 1
            model = self._of(dispatcher.model)
            self._ended(model, dispatcher.model, outcome).inc()
            model.e2e.observe(time.monotonic() - began, dispatcher.trace_id)
            self._count(dispatcher, model, tenant, dispatcher.outcome)
            dispatcher.finish_trace(outcome)

    def _ended(self, of_model: _OfModel, model: str, outcome: str) -> Counter:
        """Outcomes are few: names of error classes among them."""
        known = of_model.ended.get(outcome)
        if known is None:
            known = of_model.ended[outcome] = self.requests.labels(model, outcome)
        return known

    def _count(
        self, dispatcher: RequestDispatcher, model: _OfModel, tenant: Tenant, outcome: Outcome
    ) -> None:
        usage, timings, trace_id = outcome.usage, outcome.timings, dispatcher.trace_id
        Histogram.observe_each(zip(model.stages, _STAGES_OF(timings), strict=True), trace_id)
        first = dispatcher.first_token_seconds
        if first is not None:
            model.ttft.observe(first, trace_id)
            tenant.first_token.observe(first)
            if usage.completion_tokens > 1:
                seconds = (timings.total_seconds - first) / (usage.completion_tokens - 1)
                model.tpot.observe(seconds, trace_id)
        model.prompt_lengths.observe(usage.prompt_tokens)
        model.output_lengths.observe(usage.completion_tokens)
        for total, read in model.totals:
            if more := read(outcome):
                total.inc(more)
        tenant.prompt_tokens += usage.prompt_tokens
        tenant.cached_tokens += usage.cached_tokens
        tenant.output_tokens += usage.completion_tokens
        for reason, count in dispatcher.stats.retries.items():
            self.retries.labels(reason).inc(count)

    def _of(self, model: str) -> _OfModel:
        """`model`: of this router, never a name as a client sent it: each has series of its own."""
        known = self._by_model.get(model)
        if known is None:
            of_model = [(total.labels(model), read) for total, read in self._totals_of_model]
            known = self._by_model[model] = _OfModel.of(self._families, model, (*self._totals, *of_model))
        return known


def _outcome(dispatcher: RequestDispatcher) -> str:
    """The outcome of a request that no error ended."""
    if dispatcher.failure:  # reported on a stream that had begun
        return dispatcher.failure
    return "ok" if dispatcher.complete else "cancelled"


@dataclass(frozen=True)
class _OfModel:
    """The series of one model, and the totals of all models."""

    totals: Sequence[tuple[Counter, Callable[[Outcome], float]]]
    stages: Sequence[Histogram]  # in the order of _STAGES
    e2e: Histogram
    ttft: Histogram
    tpot: Histogram
    prompt_lengths: Histogram
    output_lengths: Histogram
    ended: dict[str, Counter] = field(init=False, default_factory=dict)  # by outcome

    @classmethod
    def of(
        cls,
        families: Mapping[str, HistogramFamily],
        model: str,
        totals: Sequence[tuple[Counter, Callable[[Outcome], float]]],
    ) -> _OfModel:
        stages = families[declared.STAGES.name]
        return cls(
            totals,
            [stages.of(model, stage) for stage in _STAGES],
            *(families[one.name].of(model) for one in _HISTOGRAMS),
        )
