"""Which requests this router admits: limits on their number, in all, by tenant, model and connection, and on the bytes
of their bodies."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial

from cluster.config.router import RouterConfig
from cluster.errors import DrainingError, OverloadedError
from cluster.security.keys import ANYONE, Caller
from router.admission.reserved import kept_part, shares_beyond
from router.admission.shares import Share, Taken
from router.admission.start_queue import StartQueue
from router.admission.tally import ALL, LocalTally, Tallies, local_tallies

RETRY_SECONDS = 1.0
MODEL_HOLDER = "\0model:"  # begins holders in the tally of tenants, whose names are printable


def most_holders(config: RouterConfig) -> int:
    """Names under which requests in flight can count at once: each request's tenant, and what that has of one model; and
    the models."""
    return 2 * config.max_concurrent_requests + len(config.model_names)


def in_flight(what: str, where: str = "") -> Callable[[int], OverloadedError]:
    """The refusal of one more request of `what`, by its limit."""

    def refusal(limit: int) -> OverloadedError:
        return OverloadedError(
            f"this {what} has {limit} requests in flight{where}",
            field="" if what == "router" else what,
            limit=str(limit),
            retry_after_seconds=RETRY_SECONDS,
        )

    return refusal


# Of each body, which are not counted: their number is limited, so long bodies never make a short one refused.
FREE_BYTES = 1 << 16


class ByteBudget:
    """Bytes of bodies held for requests not yet dispatched, of what answers repeat of them, and of whole answers not yet
    read, in all and by tenant, without FREE_BYTES of each."""

    def __init__(
        self,
        limit: int,
        tenant_limit: int,
        refused: Callable[[str], None],
        tallies: Tallies | None = None,
        model_limit: int = 0,
        models: Sequence[str] = (),
    ):
        """The tenant limit applies to named tenants. `refused` is called with the tenant of each refused body.
        `model_limit`: of each of the `models`; 0 = none."""
        self._limit = limit
        self._tenant_limit = tenant_limit
        self._model_limit = model_limit
        self._refused = refused
        tallies = local_tallies() if tallies is None else tallies
        self._all, self._tenants = tallies.bytes, tallies.tenant_bytes
        holders = [MODEL_HOLDER + model for model in models]
        kept = dict.fromkeys(holders, kept_part(limit, model_limit, len(holders)))
        self._beyond = shares_beyond(self._tenants, self._all, limit, kept, holders, _full_beyond)

    @classmethod
    def of(
        cls, config: RouterConfig, refused: Callable[[str], None], tallies: Tallies | None = None
    ) -> ByteBudget:
        """From the settings, but never too small for one body of the largest size."""
        least = config.max_body_bytes
        most = max(config.max_body_bytes_in_flight, least)
        return cls(
            most,
            max(config.max_body_bytes_in_flight_per_tenant, least),
            refused,
            tallies,
            max(most // 2, least) if config.models else 0,
            config.model_names if config.models else (),
        )

    @property
    def held(self) -> int:
        """In this process."""
        return self._all.here(ALL)

    def most(self, tenant: str, model: str = "") -> int:
        """That one holder may have."""
        of_tenant = self._tenant_limit if tenant else self._limit
        of_model = self._model_limit if model and self._model_limit else self._limit
        return min(self._limit, of_tenant, of_model)

    def hold(self, tenant: str) -> HeldBytes:
        return HeldBytes(self, tenant)

    def shares(self, tenant: str) -> list[Share]:
        of_all = Share(self._all, ALL, self._limit, partial(_full, "this router"))
        if not tenant:
            return [of_all]
        return [of_all, Share(self._tenants, tenant, self._tenant_limit, partial(_full, "this tenant"))]

    def shares_of(self, model: str) -> list[Share]:
        """Shares of a request for this model, beside the tenant's."""
        if not model or not self._model_limit:
            return []
        holder = MODEL_HOLDER + model
        own = Share(self._tenants, holder, self._model_limit, partial(_full, "this model"))
        return [own, *_of(self._beyond, holder)]

    def refused(self, tenant: str) -> None:
        """Count a refusal."""
        self._refused(tenant)


def _full(whose: str, limit: int) -> OverloadedError:
    return OverloadedError(
        f"{whose} has {limit} bytes of long bodies and unread answers in flight",
        field="body",
        limit=str(limit),
        retry_after_seconds=RETRY_SECONDS,
    )


def _full_beyond(kept: int, free: int) -> OverloadedError:
    return OverloadedError(
        f"this model has the {kept} bytes of long bodies and unread answers in flight that are kept for it, and all "
        f"models have the {free} that are kept for none",
        field="body",
        limit=str(kept),
        retry_after_seconds=RETRY_SECONDS,
    )


def _in_flight_beyond(kept: int, free: int) -> OverloadedError:
    return OverloadedError(
        f"this model has the {kept} requests in flight that are kept for it, and all models have the {free} that are kept "
        "for none",
        field="model",
        limit=str(kept),
        retry_after_seconds=RETRY_SECONDS,
    )


def _of(shares: Mapping[str, Share], holder: str) -> list[Share]:
    return [shares[holder]] if holder in shares else []


class HeldBytes:
    """One request's share of the budget: its body's, later its answer's."""

    def __init__(self, budget: ByteBudget, tenant: str):
        self.tenant = tenant
        self._budget = budget
        self._taken = Taken(budget.shares(tenant))

    def grow_to(self, size: int) -> None:
        """Raises OverloadedError; the share is then as before."""
        more = size - FREE_BYTES - self._taken.count
        if more > 0:
            try:
                self._taken.take(more)
            except OverloadedError:
                self._budget.refused(self.tenant)
                raise

    def of_model(self, model: str) -> None:
        """Count it, once whole, as the body of a request for this model. Raises OverloadedError."""
        self._taken.join(self._budget.shares_of(model))

    def check_room(self, size: int, model: str = "") -> None:
        """Whether an answer of this size, for this model, has room beside what is held; one that is larger than the budget
        needs all of it. Raises OverloadedError."""
        if size <= FREE_BYTES:
            return
        own = self._taken.count
        most = min(size - FREE_BYTES, self._budget.most(self.tenant, model) - own)
        self.grow_to(FREE_BYTES + own + most)
        self.shrink_to(FREE_BYTES + own)

    def expect_answer(self, least: int, most: int, model: str = "") -> None:
        """Before a request is dispatched: hold the least that its answer will have, in place of its body, where there is
        room for the most. Raises OverloadedError; nothing is held then."""
        self.hold_answer(most, model)
        self.shrink_to(least)

    def hold_answer(self, size: int, model: str = "") -> None:
        """Count the bytes of the request's answer, for this model, in place of its body's; of one that is larger than the
        budget, as many as it has. Raises OverloadedError; nothing is held then."""
        self.release()
        self.of_model(model)
        self.grow_to(min(size, FREE_BYTES + self._budget.most(self.tenant, model)))

    def keep(self, size: int) -> None:
        """From now on only so many bytes are held: of the body, or made from it. Raises OverloadedError if they are more
        than before and do not fit."""
        self.leave_model()
        self.grow_to(size)
        self.shrink_to(size)

    def shrink_to(self, size: int) -> None:
        less = self._taken.count - max(0, size - FREE_BYTES)
        if less > 0:
            self._taken.give_back(less)

    def release(self) -> None:
        """May be called more than once."""
        self._taken.release()

    def leave_model(self) -> None:
        self._taken.part()


class Place:
    """One request's place, to be left at the end of a `with`. It is the model's too, once the request is known to name
    that."""

    def __init__(self, admission: Admission, caller: Caller, taken: Taken):
        self.body = admission.bodies.hold(caller.tenant)
        self._admission = admission
        self._caller = caller
        self._taken = taken
        self.model = ""

    def __enter__(self) -> Place:
        return self

    def __exit__(self, *_: object) -> None:
        self.leave()

    def of_model(self, name: str) -> None:
        """Count the request, with the bytes of its body, as one of a model of this router; until now it may have been one
        of another. Raises OverloadedError, and the request is then of no model."""
        if name == self.model:
            return
        self.leave_model()
        self._taken.join(self._admission.shares_of(name, self._caller))
        try:
            self.body.of_model(name)
        except OverloadedError:
            self._taken.part()
            raise
        self.model = name

    def leave_model(self) -> None:
        self.body.leave_model()
        self._taken.part()
        self.model = ""

    def keep_body(self) -> HeldBytes:
        """What is held of the body or the answer, now its taker's to release: leaving the place does not."""
        kept, self.body = self.body, self._admission.bodies.hold(self._caller.tenant)
        return kept

    def leave(self) -> None:
        """Give the place back. May be called before the request has ended."""
        self.body.release()
        self._taken.release()
        self.model = ""


class Admission:
    """Limits on the requests in flight: in all, by tenant, by connection, and on the bytes of their bodies. `starts`: the
    order in which those that have a place are started."""

    def __init__(self, config: RouterConfig, refused: Callable[[str], None], tallies: Tallies | None = None):
        """`refused` is called with the tenant of each request that gets no place, or has too long a body.
        `tallies`: of all processes of this router; default: of this one."""
        self._config = config
        self._refused = refused
        tallies = local_tallies() if tallies is None else tallies
        self._requests, self._tenants = tallies.requests, tallies.tenant_requests
        self._beyond = self._places_beyond(config)
        self._connections = LocalTally()
        self.bodies = ByteBudget.of(config, refused, tallies)
        self.starts = StartQueue()
        self._closed = False
        # Connections on which no answer has announced the shutdown yet
        self._unaware: frozenset[str] = frozenset()

    @property
    def in_flight(self) -> int:
        """In this process."""
        return self._requests.here(ALL)

    def admit(self, caller: Caller = ANYONE, connection: str = "") -> Place:
        """Count a request as in flight, from its head on, until its place is left.

        Raises OverloadedError when a limit is reached, DrainingError when this router leaves.
        """
        if self._closed and connection not in self._unaware:
            raise DrainingError("this router is leaving; ask another one", retry_after_seconds=1.0)
        place = Place(self, caller, taken := Taken(self._shares(caller, connection)))
        try:
            taken.take(1)
        except OverloadedError:
            self._refused(caller.tenant)
            raise
        return place

    def in_model(self, name: str) -> int:
        """Requests in flight for a model, in this process."""
        return self._tenants.here(MODEL_HOLDER + name)

    def shares_of(self, model: str, caller: Caller) -> list[Share]:
        """Shares of a request for a model: that no model takes every place, nor two of them, and those that its key may
        have for that model."""
        holder = MODEL_HOLDER + model
        shares = [Share(self._tenants, holder, self._config.most_of_model(model), in_flight("model"))]
        shares += _of(self._beyond, holder)
        own = caller.limits_of(model).max_concurrent_requests
        if own:
            refusal = in_flight("tenant", f" for model {model!r}")
            shares.append(Share(self._tenants, f"{holder}\0{caller.tenant}", own, refusal))
        return shares

    def _places_beyond(self, config: RouterConfig) -> dict[str, Share]:
        """A model for which the settings give a limit may have that, whatever it leaves to the others."""
        limit, names = config.max_concurrent_requests, config.model_names
        part = kept_part(limit, max(1, limit // 2), len(names))
        kept = {MODEL_HOLDER + name: min(part, config.most_of_model(name) or part) for name in names}
        held_to = [MODEL_HOLDER + name for name in names if not config.given_most_of_model(name)]
        return shares_beyond(self._tenants, self._requests, limit, kept, held_to, _in_flight_beyond)

    def close(self, unaware: Collection[str] = ()) -> None:
        """Admit nothing more, but on `unaware`: connections whose clients could not know yet that this router leaves."""
        self._closed = True
        self._unaware = frozenset(unaware)

    def _shares(self, caller: Caller, connection: str) -> list[Share]:
        config = self._config
        limit = config.max_concurrent_requests
        shares = [Share(self._requests, ALL, limit, in_flight("router"))]
        if caller.tenant:
            own = caller.max_concurrent_requests or config.max_concurrent_requests_per_tenant
            # One key never takes every place, nor every connection where there are fewer of them.
            most = own or max(1, min(limit, config.max_http_connections) // 2)
            shares.append(Share(self._tenants, caller.tenant, most, in_flight("tenant")))
        if connection:
            most = config.max_concurrent_requests_per_connection
            shares.append(Share(self._connections, connection, most, in_flight("connection")))
        return shares
