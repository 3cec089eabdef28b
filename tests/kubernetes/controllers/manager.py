"""Runs the controllers whenever something has changed."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from types import TracebackType
from typing import Self

from tests.kubernetes.api.errors import ApiError
from tests.kubernetes.api.objects import Objects
from tests.kubernetes.controllers.base import Client, Controller
from tests.kubernetes.controllers.budgets import Budgets
from tests.kubernetes.controllers.claims import Claims
from tests.kubernetes.controllers.deployments import Deployments
from tests.kubernetes.controllers.endpoints import EndpointsController
from tests.kubernetes.controllers.garbage import Garbage, Namespaces
from tests.kubernetes.controllers.jobs import Jobs
from tests.kubernetes.controllers.leader_worker_sets import LeaderWorkerSets
from tests.kubernetes.controllers.replica_sets import ReplicaSets
from tests.kubernetes.controllers.scheduler import Scheduler
from tests.kubernetes.controllers.stateful_sets import StatefulSets

log = logging.getLogger(__name__)
# Some steps wait for time to pass (minReadySeconds, a Job's deadline), not for a change.
IDLE_SECONDS = 0.2
STOP_SECONDS = 10.0


class Controllers:
    """A cluster's own controllers, and a kubelet: a context manager around a thread."""

    def __init__(self, objects: Objects, *more: Controller):
        client = Client(objects)
        self._store = objects.store
        self._controllers: Sequence[Controller] = (
            Claims(client),
            Deployments(client),
            ReplicaSets(client),
            StatefulSets(client),
            LeaderWorkerSets(client),
            Jobs(client),
            Scheduler(client),
            *more,
            EndpointsController(client),
            Budgets(client),
            Garbage(client),
            Namespaces(client),
        )
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="controllers", daemon=True)
        self.problems: list[str] = []

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stopping.set()
        self._thread.join(STOP_SECONDS)

    def _run(self) -> None:
        while not self._stopping.is_set():
            before = self._store.revision
            for controller in self._controllers:
                self._step(controller)
            if self._store.revision == before:
                self._store.wait_past(before, IDLE_SECONDS)

    def _step(self, controller: Controller) -> None:
        try:
            controller.step()
        except ApiError as error:
            # The next look sees what has changed meanwhile; what stays wrong is for the test to read.
            problem = f"{type(controller).__name__}: {error.message}"
            if problem not in self.problems:
                self.problems.append(problem)
        except Exception:
            log.exception("%s failed", type(controller).__name__)
            self.problems.append(f"{type(controller).__name__} failed, see the log")
