"""Which requests this router admits: limits on their number, in all, by tenant, model and connection, and on the bytes
of their bodies."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Collection, Iterator

from cluster.config.router import RouterConfig
from cluster.errors import DrainingError, OverloadedError
from cluster.security.keys import ANYONE, Caller
from router.admission.start_queue import StartQueue
from router.admission.tally import ALL, LocalTally, Tallies, Tally, local_tallies

RETRY_SECONDS = 1.0
MODEL_HOLDER = "\0model:"  # begins holders in the tally of tenants, whose names are printable


def most_holders(config: RouterConfig) -> int:
    """Names under which requests in flight can count at once: each request's tenant, and what that has of one model; and
    the models."""
    return 2 * config.max_concurrent_requests + len(config.model_names)


class ConcurrencyLimiter:
    """Counts requests in flight by holder."""

    def __init__(self, what: str, taken: Tally | None = None):
        """`taken`: default: of this process alone."""
        self._what = what
        self._taken = LocalTally() if taken is None else taken

    def acquire(self, holder: str, limit: int, where: str = "") -> None:
        """Raises OverloadedError, which names the holder and `where`, when it has `limit`; 0 = no limit."""
        if self._taken.add(holder, 1) > limit > 0:
            self._taken.add(holder, -1)
            raise OverloadedError(
                f"this {self._what} has {limit} requests in flight{where}",
                field=self._what,
                limit=str(limit),
                retry_after_seconds=RETRY_SECONDS,
            )

    def release(self, holder: str) -> None:
        self._taken.add(holder, -1)


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
    ):
        """The tenant limit applies to named tenants. `refused` is called with the tenant of each refused body.
        `model_limit`: of each model; 0 = none."""
        self._limit = limit
        self._tenant_limit = tenant_limit
        self._model_limit = model_limit
        self._refused = refused
        tallies = local_tallies() if tallies is None else tallies
        self._all, self._tenants = tallies.bytes, tallies.tenant_bytes

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

    def acquire(self, tenant: str, count: int) -> None:
        """Raises OverloadedError."""
        if self._all.add(ALL, count) > self._limit:
            self._all.add(ALL, -count)
            self._refused(tenant)
            raise _full("this router", self._limit)
        if tenant and self._tenants.add(tenant, count) > self._tenant_limit:
            self.release(tenant, count)
            self._refused(tenant)
            raise _full("this tenant", self._tenant_limit)

    def release(self, tenant: str, count: int) -> None:
        self._all.add(ALL, -count)
        if tenant:
            self._tenants.add(tenant, -count)

    def acquire_of_model(self, model: str, count: int) -> None:
        """Count bytes that were acquired as those of a request for the model too, where models have a limit. Raises
        OverloadedError."""
        if not self._model_limit:
            return
        if self._tenants.add(MODEL_HOLDER + model, count) > self._model_limit:
            self.release_of_model(model, count)
            raise _full("this model", self._model_limit)

    def release_of_model(self, model: str, count: int) -> None:
        if self._model_limit:
            self._tenants.add(MODEL_HOLDER + model, -count)


def _full(whose: str, limit: int) -> OverloadedError:
    return OverloadedError(
        f"{whose} has {limit} bytes of long bodies and unread answers in flight",
        field="body",
        limit=str(limit),
        retry_after_seconds=RETRY_SECONDS,
    )


class HeldBytes:
    """One request's share of the budget: its body's, later its answer's."""

    def __init__(self, budget: ByteBudget, tenant: str):
        self.tenant = tenant
        self._budget = budget
        self._counted = 0
        self._model = ""  # the bytes count as its bytes too

    def grow_to(self, size: int) -> None:
        """Raises OverloadedError; the share is then as before."""
        more = size - FREE_BYTES - self._counted
        if more > 0:
            self._budget.acquire(self.tenant, more)
            try:
                if self._model:
                    self._budget.acquire_of_model(self._model, more)
            except OverloadedError:
                self._budget.release(self.tenant, more)
                raise
            self._counted += more

    def of_model(self, model: str) -> None:
        """Count it, once whole, as the body of a request for this model. Raises OverloadedError."""
        if self._counted and model != self._model:
            self.leave_model()
            self._budget.acquire_of_model(model, self._counted)
            self._model = model

    def hold_answer(self, size: int, model: str = "") -> None:
        """Count the bytes of the request's answer, for this model, in place of its body's; of one that is larger than the
        budget, as many as it has. Raises OverloadedError; nothing is held then."""
        self.release()
        self.grow_to(min(size, FREE_BYTES + self._budget.most(self.tenant, model)))
        try:
            if model:
                self.of_model(model)
        except OverloadedError:
            self.release()
            raise

    def keep(self, size: int) -> None:
        """From now on only so many bytes are held: of the body, or made from it. Raises OverloadedError if they are more
        than before and do not fit."""
        self.leave_model()
        self.grow_to(size)
        less = self._counted - max(0, size - FREE_BYTES)
        if less > 0:
            self._budget.release(self.tenant, less)
            self._counted -= less

    def release(self) -> None:
        """May be called more than once."""
        if self._counted:
            self.leave_model()
            self._budget.release(self.tenant, self._counted)
            self._counted = 0

    def leave_model(self) -> None:
        if self._model:
            self._budget.release_of_model(self._model, self._counted)
            self._model = ""


class Place:
    """One request's place. It is the model's too, once the request is known to name that."""

    def __init__(self, admission: Admission, caller: Caller, held: contextlib.ExitStack):
        """`held`: gives the place back."""
        self.body = admission.bodies.hold(caller.tenant)
        self._admission = admission
        self._caller = caller
        self._held = held
        held.callback(self.leave_model)
        held.callback(self.body.release)
        self._of_model = contextlib.ExitStack()
        self.model = ""

    def of_model(self, name: str) -> None:
        """Count the request, with the bytes of its body, as one of a model of this router; until now it may have been one
        of another. Raises OverloadedError, and the request is then of no model."""
        if name == self.model:
            return
        self.leave_model()
        with contextlib.ExitStack() as held:
            held.enter_context(self._admission.of_model(name, self._caller))
            self.body.of_model(name)
            self._of_model = held.pop_all()
        self.model = name

    def leave_model(self) -> None:
        self.body.leave_model()
        self._of_model.close()
        self.model = ""

    def leave(self) -> None:
        """Give the place back before the request has ended."""
        self._held.close()


class Admission:
    """Limits on the requests in flight: in all, by tenant, by connection, and on the bytes of their bodies. `starts`: the
    order in which those that have a place are started."""

    def __init__(self, config: RouterConfig, refused: Callable[[str], None], tallies: Tallies | None = None):
        """`refused` is called with the tenant of each request that gets no place, or has too long a body.
        `tallies`: of all processes of this router; default: of this one."""
        self._config = config
        self._refused = refused
        tallies = local_tallies() if tallies is None else tallies
        self._requests = tallies.requests
        self._tenants = ConcurrencyLimiter("tenant", tallies.tenant_requests)
        self._models = ConcurrencyLimiter("model", tallies.tenant_requests)
        self._connections = ConcurrencyLimiter("connection")
        self.bodies = ByteBudget.of(config, refused, tallies)
        self._in_models: Counter[str] = Counter()  # in this process
        self.starts = StartQueue()
        self._closed = False
        # Connections on which no answer has announced the shutdown yet
        self._unaware: frozenset[str] = frozenset()
        self.in_flight = 0  # in this process

    @contextlib.contextmanager
    def admit(self, caller: Caller = ANYONE, connection: str = "") -> Iterator[Place]:
        """Count a request as in flight, from its head on.

        Raises OverloadedError when a limit is reached, DrainingError when this router leaves.
        """
        with contextlib.ExitStack() as held:
            try:
                self._acquire(held, caller, connection)
            except OverloadedError:
                self._refused(caller.tenant)
                raise
            yield Place(self, caller, held)

    def in_model(self, name: str) -> int:
        """Requests in flight for a model, in this process."""
        return self._in_models[name]

    @contextlib.contextmanager
    def of_model(self, name: str, caller: Caller = ANYONE) -> Iterator[None]:
        """Count a request as one of its model's, so that no model takes every place, and as one of those that its key may
        have for that model. Raises OverloadedError."""
        holder = MODEL_HOLDER + name
        limits = [(self._models, holder, self._config.most_of_model(name), "")]
        own = caller.limits_of(name).max_concurrent_requests
        if own:
            limits.append((self._tenants, f"{holder}\0{caller.tenant}", own, f" for model {name!r}"))
        with contextlib.ExitStack() as held:
            for limiter, one, limit, where in limits:
                if limit:
                    limiter.acquire(one, limit, where)
                    held.callback(limiter.release, one)
            self._in_models[name] += 1
            try:
                yield
            finally:
                self._in_models[name] -= 1

    def close(self, unaware: Collection[str] = ()) -> None:
        """Admit nothing more, but on `unaware`: connections whose clients could not know yet that this router leaves."""
        self._closed = True
        self._unaware = frozenset(unaware)

    def _acquire(self, held: contextlib.ExitStack, caller: Caller, connection: str) -> None:
        config = self._config
        if self._closed and connection not in self._unaware:
            raise DrainingError("this router is leaving; ask another one", retry_after_seconds=1.0)
        limit = config.max_concurrent_requests
        held.callback(self._leave)
        if self._enter() > limit:
            raise OverloadedError(
                f"this router has {limit} requests in flight", limit=str(limit), retry_after_seconds=1.0
            )
        if caller.tenant:
            own = caller.max_concurrent_requests or config.max_concurrent_requests_per_tenant
            # One key never takes every place, nor every connection where there are fewer of them.
            share = max(1, min(limit, config.max_http_connections) // 2)
            self._tenants.acquire(caller.tenant, own or share)
            held.callback(self._tenants.release, caller.tenant)
        if connection:
            self._connections.acquire(connection, config.max_concurrent_requests_per_connection)
            held.callback(self._connections.release, connection)

    def _enter(self) -> int:
        """Returns the requests in flight in all processes."""
        self.in_flight += 1
        return self._requests.add(ALL, 1)

    def _leave(self) -> None:
        self.in_flight -= 1
        self._requests.add(ALL, -1)
