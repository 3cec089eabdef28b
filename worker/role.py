"""The role of a worker, prefill or decode: what the worker asks of it, and what it gets from the worker."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from prometheus_client.registry import Collector

from cluster.background_tasks import BackgroundTasks
from cluster.config.worker import WorkerConfig
from cluster.errors import BatonError
from cluster.faults.points import Faults
from cluster.membership.status import WorkerStatus
from cluster.security.tls import Peers
from engine.request import StepOutput
from wire import common_pb2
from worker.drain import DrainedRole
from worker.engine_host import EngineHost
from worker.health import Health
from worker.identity import WorkerIdentity
from worker.link.routers import Routers
from worker.ranks.ranks import Ranks
from worker.server import WorkerServer

if TYPE_CHECKING:
    from opentelemetry.context import Context

    from cluster.telemetry.tracing.spans import Tracing


@dataclass(frozen=True)
class RoleParts:
    """The parts of a worker that its role uses."""

    config: WorkerConfig
    identity: WorkerIdentity
    health: Health
    host: EngineHost
    ranks: Ranks
    server: WorkerServer  # to which the role adds its service
    peers: Peers
    faults: Faults
    tracing: Tracing | None
    background_tasks: BackgroundTasks
    fail: Callable[[str], None]  # ends the worker as failed, at once
    drain_and_fail: Callable[[str], None]  # for a reason that only a new process removes

    def trace_of(self, spec: common_pb2.GenerateSpec) -> Context | None:
        """The router's span, the parent of this worker's spans. None: the request is not traced here."""
        if self.tracing is None or not spec.trace_parent:
            return None
        return self.tracing.remote_parent(spec.trace_parent, spec.trace_state)


class Role(DrainedRole, Protocol):
    """Every method is called on the worker's loop, `status` and collectors excepted: these only read."""

    @property
    def routers(self) -> Routers:
        """The routers that read its attempts."""

    async def start(self) -> None:
        """Start what runs while the worker serves."""

    def adapters_held(self) -> Collection[str]:
        """Digests of the adapters of its requests, those that wait for their turn or a hand-off included."""

    def on_output(self, output: StepOutput) -> None:
        """Take the results of an engine step."""

    def failed(self, error: BatonError) -> None:
        """The worker has failed: EngineFailedError ends the attempts of the failed step, any other error all attempts."""

    async def fenced(self) -> None:
        """Routers have given up the old epoch: end what it began. The identity has the new epoch already."""

    def status(self, status: WorkerStatus) -> WorkerStatus:
        """`status` with what the role publishes. Any thread."""

    def collectors(self) -> Sequence[Collector]:
        """The role's metrics."""

    def check_integrity(self) -> None:
        """Raises AssertionError if the role's accounts are inconsistent."""

    def closers(self) -> Sequence[Callable[[], Awaitable[None]]]:
        """Close functions, in order; each is called although an earlier one failed."""


MakeRole = Callable[[RoleParts], Role]
