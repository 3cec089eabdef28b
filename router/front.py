"""What both doors share: validation, admission, and the measuring of every request."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

from cluster.errors import OverloadedError
from router.completion import Completion
from router.dispatch.life import RequestLife
from router.dispatch.services import Services
from router.metrics import RouterMetrics
from router.validate import Validator


class Front:
    def __init__(self, services: Services, metrics: RouterMetrics):
        self.services = services
        self.text = services.text
        self.config = services.config
        self.validator = Validator(services.config, services.text)
        self.created_unix_seconds = int(time.time())
        self.started = time.monotonic()
        self.metrics = metrics
        self.in_flight = 0
        self.requests = 0

    @contextlib.contextmanager
    def admit(self, completion: Completion, first_shown: int = 0) -> Iterator[RequestLife]:
        """One of the router's places for a request. Raises OverloadedError when all are taken."""
        limit = self.config.max_concurrent_requests
        if self.in_flight >= limit:
            self.metrics.requests.labels("overloaded").inc()
            raise OverloadedError(
                f"this router has {limit} requests in flight", limit=str(limit), retry_after_seconds=1.0
            )
        self.in_flight += 1
        self.requests += 1
        life = RequestLife(completion, self.services, first_shown)
        try:
            with self.metrics.request(life):
                yield life
        finally:
            self.in_flight -= 1

    def ready(self) -> bool:
        """Can a request be served now?"""
        members = self.services.members
        if not members.decode:
            return False
        return bool(members.prefill) or self.services.placement.mode != "never"
