"""Ray's head and the process that deploys the pools; both restart when any of Ray's own processes dies.

ray exits ──► its pools process is ended ──► ray, pools again ──► new replicas take over the workers, which keep serving
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path

from baton.local import children, ray_head
from baton.local.children import Child
from baton.local.ray_head import RayHead
from baton.local.supervisor import Supervisor
from baton.ray_pools.supervision import worker_sockets
from cluster.errors import SetupError

log = logging.getLogger(__name__)

KILL_SECONDS = 0.1


class RayPools:
    """`described`: the file that `baton pools` reads. `launch` starts a head; its log belongs to the caller."""

    def __init__(self, described: Path, logs: Path, workers: Path, launch: Callable[[], RayHead]):
        self._described = described
        self._logs = logs
        self._workers = workers
        self._launch = launch
        self._deployed = described.with_suffix(".ready")
        self._head: RayHead | None = None
        self._ray = Supervisor()
        self._pools = Supervisor()
        worker_sockets.write_owner(workers)

    def start(self) -> None:
        """Return when Ray accepts connections; workers start later. Raises SetupError."""
        try:
            head = self._start_head()
        except SetupError as error:
            # Ray limits its start to 30 s, which a busy machine may exceed, rarely twice.
            log.warning("once more: %s", error)
            head = self._start_head()
        self._ray.add(head.child, self._start_again, on_exit=self._ray_exited)
        self._deploy(head)

    def _start_head(self) -> RayHead:
        head = self._head = self._launch()
        try:
            ray_head.wait_until_started(head)
        except SetupError:
            head.stop()
            raise
        return head

    def check(self) -> list[str]:
        """Restart processes that have died (see Supervisor)."""
        return [*self._ray.check(), *self._pools.check()]

    @property
    def children(self) -> list[Child]:
        return [*self._ray.children, *self._pools.children]

    def stop(self, seconds: float) -> None:
        ray_lives = all(child.exit_code() is None for child in self._ray.children)
        # Stopping it ends Serve, its replicas and their workers; without Ray it would wait for ever.
        children.stop_all(self._pools.children, seconds if ray_lives else KILL_SECONDS)
        if self._head is not None:
            self._head.stop()
        worker_sockets.end_all(self._workers, seconds)

    def _ray_exited(self, child: Child) -> None:
        """Called after Ray's exit, perhaps only when the next Ray already runs, which then owns the pools."""
        if self._head is not None and self._head.child is child:
            self._end_pools()

    def _end_pools(self) -> None:
        for one in self._pools.children:
            one.stop(KILL_SECONDS)
        self._pools = Supervisor()

    def _start_again(self) -> Child:
        """Restart without waiting for Ray, because the caller also watches routers; `baton pools` waits."""
        self._end_pools()
        self._head = self._launch()
        self._deploy(self._head)
        return self._head.child

    def _deploy(self, head: RayHead) -> None:
        self._deployed.unlink(missing_ok=True)
        start = partial(self._start_pools, head)
        self._pools.add(start(), start)

    def _start_pools(self, head: RayHead) -> Child:
        command = children.baton_command("pools", "--config", str(self._described), "--address", head.address)
        command += ["--ready-file", str(self._deployed)]
        if self._deployed.exists():  # only this process died; deploying again would replace every worker
            command.append("--deployed")
        return children.start("pools", command, self._logs, head.env)
