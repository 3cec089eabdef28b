"""`baton pools`: deploys the Serve application and keeps it until SIGTERM or Ctrl-C.

`baton serve-app` deploys it on a Ray cluster that exists, through its dashboard.
"""

from __future__ import annotations

import atexit
import json
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from baton.autoscaler.config import ServeAutoscalingConfig
from baton.cli.output import say, tell
from baton.cli.serve import ReadyFile, try_to_write_ready
from cluster.config import sources
from cluster.config.worker import Role
from cluster.config.yaml_file import read_yaml
from cluster.errors import ConfigError, DeadlineError, SetupError, UnavailableError
from cluster.ray_head import RayHeadWatch, call_ray, within

if TYPE_CHECKING:
    from baton.ray_pools.serve_app import PoolDescription

RAY_SECONDS = 60.0
# After a signal, while Ray's head responds but a call of Ray's does not return: a deployment looks for the signal between
# its calls, and Serve's end takes 30 s at most beside them. So this process ends within the sum of both.
STOP_SECONDS = 20.0
END_SECONDS = 60.0
DASHBOARD_SECONDS = 30.0
POLL_SECONDS = 1.0
FAILED = ("DEPLOY_FAILED", "UNHEALTHY")
# Set in the chart's pods, but not on the nodes of another cluster.
SECRETS = ("BATON_SECRET", "BATON_REDIS_URL")
IF_SET = ("BATON_INDEX_URL",)  # passed on too, where this process has them


def pools(
    config: Annotated[Path, typer.Option(help="JSON: {prefill: [worker…], decode: [worker…]}.")],
    address: Annotated[str, typer.Option(help="Ray cluster, host:port.")] = "auto",
    deployed: Annotated[
        bool,
        typer.Option(
            "--deployed", help="The pools run there already: deploy nothing, and end them at the end."
        ),
    ] = False,
    ready_file: ReadyFile = None,
) -> None:
    """Deploy both pools on a Ray cluster as one Serve application, and stay until told to stop."""
    # `config`: {"environment": {…}, "prefill": [worker, …], "decode": [worker, …]}, and "autoscaling": {…}
    # (baton/autoscaler/config.py) where the pools are to be sized by load.
    stop = _set_by_signals(threading.Event())
    described = _read(config)
    found = _pools(described)
    try:
        head = _connect(address, stop)
    except SetupError:
        if stop.is_set():  # a signal has ended the wait for it
            return
        raise
    # Ray has put a handler of its own before that of SIGTERM: it aborts the process 3 s later, while the pools drain.
    _set_by_signals(stop)
    watch = RayHeadWatch(head, means="workers that serve go on; none is started, replaced or removed")
    # Before that, Serve's controller is not asked to end anything: it may serve others, or hang.
    has_pools = deployed
    try:
        if not deployed:
            _reach(head, stop)
            has_pools = True
            _deploy(head, found, described, stop)
            tell("pools are deployed")
        try_to_write_ready(ready_file, {"pid": os.getpid()})
        stop.wait()
    except SetupError:
        if not stop.is_set():  # else a signal has ended the deployment
            raise
    except RuntimeError as error:
        raise SetupError(f"the pools did not start: {error}") from error
    finally:
        _disconnect(head, watch, has_pools=has_pools)


def _set_by_signals(stop: threading.Event) -> threading.Event:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.set())
    return stop


def _pools(described: Mapping[str, Any]) -> dict[Role, PoolDescription]:
    """The pools, checked before Ray is waited for. Raises ConfigError."""
    from baton.ray_pools.serve_app import ROLES, PoolDescription

    for role in ROLES:
        workers = described.get(role) or []
        if not isinstance(workers, list) or not all(isinstance(one, dict) for one in workers):
            raise ConfigError(
                f"--config: {role} must be a list of workers, each with its settings", field=role
            )
    found: dict[Role, PoolDescription] = {
        role: PoolDescription(replicas=len(alike), config=alike[0])
        for role in ROLES
        if (alike := described.get(role))
    }
    for pool in found.values():
        pool.worker()
    return found


def _reach(head: str, stop: threading.Event) -> None:
    """Wait for Serve's controller, if there is one. Raises SetupError if it or Ray's head does not respond, or `stop` is
    set meanwhile."""
    from baton.ray_pools.deploy import reach_controller

    call_ray(
        head,
        "the search for Serve's controller",
        lambda: reach_controller(stop),
        math.inf,
        stop=stop,
        stop_seconds=STOP_SECONDS,
    )


def _deploy(
    head: str, found: Mapping[Role, PoolDescription], described: Mapping[str, Any], stop: threading.Event
) -> None:
    """Raises SetupError if Ray's head stops responding, or `stop` is set meanwhile. It is `deploy` that looks at that, and
    has STOP_SECONDS for it: a thread left behind may deploy the pools beside their end, until this process exits."""
    from baton.ray_pools.deploy import deploy

    policy = described.get("autoscaling")
    scaled = None if policy is None else sources.load(ServeAutoscalingConfig, policy)
    environment = described.get("environment", {})
    call_ray(
        head,
        "the deployment of the pools",
        lambda: deploy(found, environment, scaled, stop),
        math.inf,
        stop=stop,
        stop_seconds=STOP_SECONDS,
    )


def _disconnect(head: str, watch: RayHeadWatch, *, has_pools: bool) -> None:
    """End the pools, if this process `has_pools`, and if Ray's head responds, within END_SECONDS; else they stay, and the
    exit code will be 1."""
    from baton.ray_pools.deploy import disconnect, shutdown

    silent = watch.why_silent
    watch.close()
    try:
        if silent:
            raise SetupError(silent)
        if has_pools:
            call_ray(head, "the end of the pools", shutdown, END_SECONDS)
        else:
            call_ray(head, "the end of the connection", disconnect, END_SECONDS)
    except SetupError as error:
        tell(f"the pools stay as they are: {error.message}" if has_pools else error.message)
        # Before Ray's exit handler, which would wait for the head: the last one registered is called first.
        atexit.register(_exit_at_once)


def _exit_at_once() -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1)


def _connect(address: str, stop: threading.Event) -> str:
    """Connect to Ray, which may be starting, and return its head's address. Raises SetupError."""
    from worker.ranks.ray_connection import connect_to_ray

    return connect_to_ray(address, RAY_SECONDS, stop)


def _read(config: Path) -> dict[str, Any]:
    try:
        described: dict[str, Any] = json.loads(config.read_text())
    except OSError as error:
        raise ConfigError(f"--config {config} cannot be read: {error.strerror}", field="config") from error
    except ValueError as error:
        raise ConfigError(f"--config {config} is not JSON: {error}", field="config") from error
    if not isinstance(described, dict):
        raise ConfigError(
            f"--config {config} describes no pools: write {{prefill: [worker…], decode: [worker…]}}",
            field="config",
        )
    return described


serve_app = typer.Typer(help="Deploy the pools on a Ray cluster that exists.", no_args_is_help=True)
Dashboard = Annotated[str, typer.Option(help="Its dashboard, e.g. http://ray-head:8265.")]


@serve_app.command()
def apply(
    dashboard: Dashboard,
    config: Annotated[Path, typer.Option(help="Serve's configuration (YAML).")],
    seconds: Annotated[float, typer.Option(min=0, help="How long to wait until it runs.")] = 540.0,
) -> None:
    """Deploy both pools, with this process's BATON_SECRET, BATON_REDIS_URL and BATON_INDEX_URL, and wait."""
    ours = with_secrets(_read_applications(config), os.environ)
    names = [one["name"] for one in ours["applications"]]
    client = _client(dashboard)
    wanted = beside(_ask(dashboard, client.get_serve_details), ours)
    _ask(dashboard, lambda: client.deploy_applications(wanted))
    _wait_running(dashboard, client, names, seconds)
    say(f"{', '.join(names)} runs at {dashboard}")


@serve_app.command()
def remove(
    dashboard: Dashboard,
    name: Annotated[str, typer.Option(help="The application's name.")] = "baton",
) -> None:
    """Take the pools away again; their workers drain."""
    client = _client(dashboard)
    left = beside(_ask(dashboard, client.get_serve_details), {"applications": []}, without=name)
    _ask(dashboard, lambda: client.deploy_applications(left))
    say(f"{name} at {dashboard} is being removed")


def beside(details: dict[str, Any], ours: dict[str, Any], without: str = "") -> dict[str, Any]:
    """A configuration replaces all applications that one has made: those of others must be in ours too."""
    named = {one["name"] for one in ours["applications"]} | {without}
    found = details.get("applications", {})
    others = [one["deployed_app_config"] for name, one in found.items() if name not in named]
    applications = [*(one for one in others if one is not None), *ours["applications"]]
    # How a Serve that runs already listens is not ours to change.
    rest = {} if found else {key: value for key, value in ours.items() if key != "applications"}
    return {**rest, "applications": applications}


def with_secrets(config: dict[str, Any], environment: Any) -> dict[str, Any]:
    """The configuration, with the secrets for its workers. Raises ConfigError where one is missing."""
    missing = [name for name in SECRETS if not environment.get(name)]
    if missing:
        raise ConfigError(f"{missing[0]} is not set: workers need it", field=missing[0])
    found = {name: environment[name] for name in (*SECRETS, *IF_SET) if environment.get(name)}
    applications = [
        {**one, "runtime_env": {"env_vars": {**one.get("runtime_env", {}).get("env_vars", {}), **found}}}
        for one in config["applications"]
    ]
    return {**config, "applications": applications}


def _read_applications(config: Path) -> dict[str, Any]:
    read = read_yaml(config, "config")
    if not isinstance(read, dict) or "applications" not in read:
        raise ConfigError(f"--config {config} holds no applications", field="config")
    return read


def _client(dashboard: str) -> Any:
    from ray.dashboard.modules.serve.sdk import ServeSubmissionClient

    return _ask(dashboard, lambda: ServeSubmissionClient(dashboard))


def _ask(dashboard: str, call: Any) -> Any:
    """Ray's client for the dashboard has no time-out. Raises UnavailableError."""
    try:
        return within(call, DASHBOARD_SECONDS)
    except TimeoutError:
        raise UnavailableError(
            f"Ray's dashboard at {dashboard} has not responded for {DASHBOARD_SECONDS:.0f} s: it or Ray's head hangs",
            field="dashboard",
        ) from None
    except (ConnectionError, RuntimeError, OSError) as error:
        raise UnavailableError(f"Ray at {dashboard}: {error}", field="dashboard") from error


def _wait_running(dashboard: str, client: Any, names: list[str], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while True:
        seen = _ask(dashboard, client.get_serve_details)["applications"]
        states = {name: seen.get(name, {}) for name in names}
        if all(state.get("status") == "RUNNING" for state in states.values()):
            return
        for name, state in states.items():
            if state.get("status") in FAILED:
                raise SetupError(f"{name} does not start: {state.get('message', '')}")
        if time.monotonic() > deadline:
            raise DeadlineError(f"{names} did not run within {seconds:.0f} s: {states}", field="seconds")
        time.sleep(POLL_SECONDS)
