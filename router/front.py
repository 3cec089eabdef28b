"""What both doors share: validation, admission, and the measuring of every request."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import replace

from cluster.auth.key_file import ApiKeys
from cluster.auth.keys import ANYONE, Caller
from cluster.errors import OverloadedError
from router.completion import Completion
from router.dispatch.life import RequestLife
from router.dispatch.services import Services
from router.limits import Places
from router.metrics import RouterMetrics
from router.validate import Validator


class Front:
    def __init__(self, services: Services, metrics: RouterMetrics, keys: ApiKeys):
        self.services = services
        self.text = services.text
        self.config = services.config
        self.validator = Validator(services.config, services.text)
        self.created_unix_seconds = int(time.time())
        self.started = time.monotonic()
        self.metrics = metrics
        self.keys = keys
        self._tenants = Places("tenant")
        self._connections = Places("connection")
        self.in_flight = 0
        self.requests = 0

    @contextlib.contextmanager
    def admit(
        self, completion: Completion, caller: Caller = ANYONE, connection: str = "", first_shown: int = 0
    ) -> Iterator[RequestLife]:
        """A place for a request: the router's, its tenant's and its connection's.

        Raises OverloadedError when one of them is full.
        """
        with contextlib.ExitStack() as places:
            try:
                self._take(places, caller, connection)
            except OverloadedError:
                self.metrics.requests.labels("overloaded").inc()
                raise
            self.requests += 1
            life = RequestLife(self._owned(completion, caller), self.services, first_shown)
            with self.metrics.request(life):
                yield life

    def _take(self, places: contextlib.ExitStack, caller: Caller, connection: str) -> None:
        limit = self.config.max_concurrent_requests
        if self.in_flight >= limit:
            raise OverloadedError(
                f"this router has {limit} requests in flight", limit=str(limit), retry_after_seconds=1.0
            )
        if caller.tenant:
            own = caller.max_concurrent_requests or self.config.max_concurrent_requests_per_tenant
            self._tenants.take(caller.tenant, own)
            places.callback(self._tenants.give_back, caller.tenant)
        if connection:
            self._connections.take(connection, self.config.max_concurrent_requests_per_connection)
            places.callback(self._connections.give_back, connection)
        self.in_flight += 1
        places.callback(self._leave)

    def _leave(self) -> None:
        self.in_flight -= 1

    def _owned(self, completion: Completion, caller: Caller) -> Completion:
        """The request with its owner, who decides with whom it shares prefixes."""
        if not caller.tenant:
            return completion
        shared = self.config.share_prefixes_across_tenants
        scope = "" if shared else caller.tenant
        return replace(
            completion,
            tenant=caller.tenant,
            weight=caller.weight,
            rate_limits=caller.rate_limits,
            prefix_scope=scope,
        )

    def ready(self) -> bool:
        """Can a request be served now?"""
        members = self.services.members
        if not members.decode:
            return False
        return bool(members.prefill) or self.services.placement.mode != "never"
