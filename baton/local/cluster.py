"""Starts, watches and stops the processes of `baton up`.

Redis ─► routers + workers (side by side) ─► all registered, routers ready ─► state file
run:   processes that die are started again: a router at its old address, a worker under a new id (the old one has ended
       for good); Ray as a whole, while its workers continue
stop:  routers ─► workers (and Ray) ─► Redis          only processes that were started here
"""

from __future__ import annotations

import json
import os
import secrets
import time
import urllib.request
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import redis

from baton.local import children
from baton.local.children import Child
from baton.local.folder import ClusterFolder, remove_left
from baton.local.options import UpOptions, without_secrets
from baton.local.ray_pools import RayPools, launch
from baton.local.state import ClusterState, RedisState, RouterState, WorkerState, check_writable, remove_state
from baton.local.supervisor import Supervisor
from baton.processes.exit_notices import ExitNotices
from baton.ray_pools.supervision import worker_sockets
from cluster.config.router import FurtherModel, RouterConfig
from cluster.config.worker import ROLES, Role, WorkerConfig
from cluster.errors import SetupError
from cluster.membership.reader import read_workers
from cluster.membership.types import WorkerInfo
from cluster.redis.connect import why_silent
from cluster.redis.embedded import EmbeddedRedis
from cluster.redis.server import ask_why_unusable
from cluster.redis.urls import with_hash_tag, without_password

START_SECONDS = 300.0
STOP_SECONDS = 40.0
Progress = Callable[[str], None]
T = TypeVar("T")


class LocalCluster:
    """A cluster on this machine. Call `start`, then `watch` periodically, and `stop` in any case."""

    def __init__(
        self,
        options: UpOptions,
        progress: Progress = lambda line: None,
        start_seconds: float = START_SECONDS,
    ):
        """Raises ConfigError if the state file cannot be written, SetupError if no file can."""
        if options.state_file is not None:
            check_writable(options.state_file, "--state-file", "state_file")
        self._notices = ExitNotices(options.tls.peers())  # first: it raises where certificates are wrong
        self._options = options
        self._start_seconds = start_seconds
        self._progress = progress
        remove_left()
        self._folder = ClusterFolder()
        self._dir, self._logs = self._folder.path, self._folder.logs
        self._redis: EmbeddedRedis | None = None
        self._redis_url = ""  # of the embedded one, once it runs
        self._namespace = options.namespace or f"baton-{secrets.token_hex(4)}"
        if options.redis_url:
            self._redis_url = with_hash_tag(options.redis_url, self._namespace)
        self._secret = secrets.token_hex(16)
        self._ray: RayPools | None = None
        self._routers = Supervisor()
        self._workers = Supervisor()
        self._servers = Supervisor()  # Redis
        self._written: ClusterState | None = None
        self._ports: dict[str, dict[str, int]] = {}  # last ports of each router
        self._unwritten = False  # the last write of the state file failed

    @property
    def logs(self) -> Path:
        return self._logs

    def start(self) -> ClusterState:
        """Start every process and wait until the cluster serves.

        Raises SetupError, ConfigError or ModelError; then `stop` still has to be called. A SetupError names the log
        folder if there are logs: stop(keep_logs=True) leaves it.
        """
        try:
            return self._start()
        except SetupError as error:
            raise SetupError(f"{error.message}{self._where_logs_are()}", field=error.field) from error
        except OSError as error:  # a full disk, no more processes
            raise SetupError(
                f"the cluster in {self._dir} does not start: {error}{self._where_logs_are()}"
            ) from error

    def _start(self) -> ClusterState:
        self._start_redis()
        self._start_routers()
        if self._options.pool == "ray":
            self._start_ray_pools()
        else:
            self._start_worker_processes()
        workers = self._wait_for_workers()
        routers = self._wait_for_routers()
        for router in routers:
            self._wait_until_ready(router.http)
        state = self._state(routers, workers)
        self._write_state(state)
        return state

    def watch(self) -> list[str]:
        """Restart processes that have died and update the state file. Returns messages for the user."""
        said = [*self._servers.check(), *self._routers.check(), *self._workers.check()]
        if self._ray is not None:
            said += self._ray.check()
        self._notices.send({one.id: one.address for one in self._ready_workers("decode")})
        if self._options.pool == "process" and self._written is not None:
            said += self._follow_state(self._written)
        return said

    def _follow_state(self, written: ClusterState) -> list[str]:
        routers = [RouterState(**facts) for facts in self._ready(self._routers)]
        state = replace(
            written,
            redis=self._redis_state(),
            router=routers,
            prefill=self._ready_workers("prefill"),
            decode=self._ready_workers("decode"),
        )
        try:
            self._write_state(state)
        except OSError as error:
            # A full disk must not end the cluster: the write is retried, and reported once.
            said = f"the state file could not be written and is out of date: {error}"
            reported, self._unwritten = self._unwritten, True
            return [] if reported else [said]
        self._unwritten = False
        return []

    def _redis_state(self) -> RedisState:
        return RedisState(
            without_password(self._redis_url), self._redis.pid if self._redis is not None else None
        )

    def _ready(self, supervisor: Supervisor) -> list[dict[str, Any]]:
        """Return the ready files of the running children."""
        running = [child for child in supervisor.children if child.exit_code() is None]
        read = (_read_if_there(self._ready_file(child.name)) for child in running)
        return [facts for facts in read if facts is not None]

    def _ready_workers(self, role: Role) -> list[WorkerState]:
        return [
            WorkerState(facts["id"], facts["pid"], facts["address"], facts["metrics"])
            for facts in self._ready(self._workers)
            if facts["role"] == role
        ]

    def _ready_file(self, name: str) -> Path:
        return self._dir / f"{name}.ready"

    def _has_served(self, child: Child) -> bool:
        return self._ready_file(child.name).exists()

    def _write_state(self, state: ClusterState) -> None:
        if state != self._written and self._options.state_file is not None:
            state.write(self._options.state_file)
        self._written = state

    def stop(self, *, keep_logs: bool = False) -> None:
        """Stop what was started here and nothing else; safe to call at any point of a start.

        `keep_logs` leaves the log folder, for a start that failed; all other files, which hold secrets, are removed.
        """
        self._notices.close()
        children.stop_all(self._routers.children, STOP_SECONDS)
        children.stop_all(self._workers.children, STOP_SECONDS)
        if self._ray is not None:
            self._ray.stop(STOP_SECONDS)
        if self._redis is not None:
            self._redis.stop()
        if self._options.state_file is not None:
            remove_state(self._options.state_file, self._logs)
        self._folder.remove(keep_logs=keep_logs and bool(self._where_logs_are()))

    def _where_logs_are(self) -> str:
        return f"\nlogs: {self._logs}" if any(self._logs.iterdir()) else ""

    def _all_children(self) -> list[Child]:
        ray = self._ray.children if self._ray is not None else []
        return [*self._servers.children, *self._routers.children, *self._workers.children, *ray]

    def _start_redis(self) -> None:
        if self._options.index_url:
            advice = "start one there, or omit --index-url: the prefix index then shares the other Redis"
            self._check_redis(self._options.index_url, advice, "index_url")
        if self._redis_url:
            advice = "start one there, or omit --redis-url and BATON_REDIS_URL: baton up starts its own"
            self._check_redis(self._redis_url, advice, "redis_url")
            return
        self._progress("starting Redis")
        self._servers.add(self._start_embedded(), self._start_embedded)

    def _check_redis(self, url: str, advice: str, field: str) -> None:
        """Raise SetupError if it does not answer, or cannot be used: workers could not register, and the start would time
        out."""
        url = with_hash_tag(url, self._namespace)
        if why := why_silent(url, advice) or ask_why_unusable(url):
            raise SetupError(why, field=field)

    def _start_embedded(self) -> Child:
        self._redis = EmbeddedRedis.start(self._dir / "redis")
        self._redis_url = self._redis.url
        return Child("redis", self._redis.process, self._dir / "redis" / "redis.log")

    def _start_routers(self) -> None:
        self._progress(f"starting {self._options.routers} router(s)")
        for index in range(self._options.routers):
            config = self._options.router_config(index, self._redis_url, self._namespace, self._secret)
            start = partial(self._start_router, f"router-{index}", config)
            self._routers.add(start(), start, served=self._has_served)

    def _start_router(self, name: str, config: RouterConfig) -> Child:
        """Start or restart a router, at the same addresses after a restart."""
        ready = self._ready_file(name)
        last = _read_if_there(ready)
        if last is not None:
            self._ports[name] = {"http_port": _port(last["http"]), "grpc_port": _port(last["grpc"])}
        config = config.model_copy(update=self._ports.get(name, {}))
        path = self._write_config(name, config.model_dump(mode="json"))
        ready.unlink(missing_ok=True)
        command = children.baton_command("router", "--config", str(path), "--ready-file", str(ready))
        return children.start(name, command, self._logs)

    def _worker_configs(self) -> dict[str, list[dict[str, Any]]]:
        """Settings of workers in a form without secrets, which Ray may store."""
        configs: dict[str, list[dict[str, Any]]] = {role: [] for role in ROLES}
        for role, model in self._options.workers:
            configs[role].append(without_secrets(self._worker_config(role, model), self._dir))
        return configs

    def _worker_config(self, role: Role, model: FurtherModel | None) -> WorkerConfig:
        return self._options.worker_config(role, self._redis_url, self._namespace, self._secret, model)

    def _start_worker_processes(self) -> None:
        self._progress("starting workers")
        for role, model in self._options.workers:
            start = partial(self._start_worker, role, model)
            self._workers.add(start(), start, partial(self._gone, role), served=self._has_served)

    def _start_worker(self, role: Role, model: FurtherModel | None) -> Child:
        """Start a worker under a new id, so that statements about a dead process never apply to its successor."""
        config = self._worker_config(role, model)
        name = config.worker_id
        path = self._write_config(name, config.model_dump(mode="json"))
        ready = str(self._ready_file(name))
        command = children.baton_command(role, "--config", str(path), "--ready-file", ready)
        return children.start(name, command, self._logs, self._options.worker_environment())

    def _gone(self, role: Role, child: Child) -> None:
        if role == "prefill":
            self._notices.add(child.name, [worker.id for worker in self._ready_workers("decode")])

    def _start_ray_pools(self) -> None:
        self._progress("starting Ray")
        options, policy = self._options, self._options.policy
        kept = self._dir / "workers"
        described: dict[str, Any] = {
            **self._worker_configs(),
            "environment": {**options.worker_environment(), worker_sockets.DIRECTORY_VARIABLE: str(kept)},
        }
        if policy is not None:
            described["autoscaling"] = policy.model_dump(mode="json")
        push = policy.interval_seconds / 2 if policy is not None else 0.0
        start = partial(launch, options.ray_cpus + 1, self._logs, self._dir / "ray", push_seconds=push)
        self._ray = RayPools(self._write_config("pools", described), self._logs, kept, start)
        self._ray.start()

    def _write_config(self, name: str, config: dict[str, Any]) -> Path:
        path = self._dir / f"{name}.json"
        path.touch(mode=0o600)  # it holds the deployment secret
        path.write_text(json.dumps(config))
        return path

    def _wait_for_workers(self) -> list[WorkerInfo]:
        wanted = len(self._options.workers)

        def registered() -> list[WorkerInfo] | None:
            try:
                workers = read_workers(self._redis_url, self._namespace)
            except redis.RedisError as error:
                self._progress(f"workers: Redis does not answer ({error})")
                return None
            live = [worker for worker in workers if worker.lease == "live"]
            self._progress(f"workers: {len(live)} of {wanted} ready")
            return live if len(live) >= wanted else None

        return self._poll(registered, "the workers did not register")

    def _wait_for_routers(self) -> list[RouterState]:
        self._progress("waiting for the routers")
        states = []
        for child in self._routers.children:
            path = self._ready_file(child.name)
            facts = self._poll(partial(_read_if_there, path), f"{child.name} did not start")
            states.append(RouterState(**facts))
        return states

    def _wait_until_ready(self, http: str) -> None:
        wanted = len(self._options.workers)
        keys = self._options.router_config(0).api_keys_file is not None
        tls = self._options.tls.client()
        context = tls.context() if tls is not None else None
        # Without proxies: one of the environment would get requests for routers on this machine.
        opener = urllib.request.build_opener(
            urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=context)
        )

        def ready() -> bool | None:
            # The router's own view must include every worker, or its first requests would use a part of the cluster.
            # With API keys on, that view needs an admin's key, which `baton up` does not have.
            path = "ready" if keys else "v1/cluster"
            try:
                with opener.open(f"{http}/{path}", timeout=2.0) as answer:
                    view = json.load(answer)
            except OSError:
                return None
            if keys:
                return True
            return True if sum(one["lease"] == "live" for one in view["workers"]) >= wanted else None

        self._poll(ready, "the router did not become ready")

    def _poll(self, check: Callable[[], T | None], failure: str) -> T:
        deadline = time.monotonic() + self._start_seconds
        while (result := check()) is None:
            children.check_alive(self._all_children())
            if time.monotonic() > deadline:
                raise SetupError(f"{failure} within {self._start_seconds:.0f} s")
            time.sleep(0.1)
        return result

    def _state(self, routers: list[RouterState], workers: list[WorkerInfo]) -> ClusterState:
        def of_role(role: Role) -> list[WorkerState]:
            return [
                WorkerState(w.worker_id, w.status.pid, w.address, w.metrics_address)
                for w in workers
                if w.role == role
            ]

        return ClusterState(
            http=routers[0].http,
            grpc=routers[0].grpc,
            redis=self._redis_state(),
            router=routers,
            prefill=of_role("prefill"),
            decode=of_role("decode"),
            pid=os.getpid(),
            logs=str(self._logs),
        )


def _port(address: str) -> int:
    return int(address.rsplit(":", 1)[1])


def _read_if_there(path: Path) -> dict[str, Any] | None:
    if not path.exists():
        return None
    facts: dict[str, Any] = json.loads(path.read_text())
    return facts
