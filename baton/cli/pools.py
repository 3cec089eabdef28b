"""`baton pools`: deploys the Serve application and keeps it until SIGTERM or Ctrl-C.

`baton serve-app` deploys it on a Ray cluster that exists, through its dashboard.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import threading
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from baton.autoscaler.config import ServeAutoscalingConfig
from baton.cli.output import say
from baton.cli.serve import ReadyFile, write_ready
from cluster.config import sources
from cluster.config.yaml_file import read_yaml
from cluster.errors import ConfigError, DeadlineError, SetupError, UnavailableError

RAY_SECONDS = 60.0
RETRY_SECONDS = 0.5
LOOK_SECONDS = 1.0
FAILED = ("DEPLOY_FAILED", "UNHEALTHY")
SECRETS = (
    "BATON_SECRET",
    "BATON_REDIS_URL",
)  # set in the chart's pods, unknown to the nodes of another cluster
IF_SET = ("BATON_INDEX_URL",)


def pools(
    config: Annotated[Path, typer.Option(help="JSON: {prefill: [worker…], decode: [worker…]}.")],
    address: Annotated[str, typer.Option(help="Ray cluster, host:port.")] = "auto",
    deployed: Annotated[
        bool,
        typer.Option("--deployed", help="The pools run there already: only stay, and end them in the end."),
    ] = False,
    ready_file: ReadyFile = None,
) -> None:
    """Deploy both pools on a Ray cluster as one Serve application, and stay until told to stop."""
    # `config`: {"environment": {…}, "prefill": [worker, …], "decode": [worker, …]}, and "autoscaling": {…}
    # (baton/autoscaler/config.py) where the pools are to be sized by load.
    stop = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.set())
    import ray

    from baton.ray_pools.deploy import deploy, shutdown
    from baton.ray_pools.serve_app import ROLES, PoolDescription

    described = _read(config)
    found = {
        role: PoolDescription(replicas=len(alike), config=alike[0])
        for role in ROLES
        if (alike := described.get(role))
    }
    for pool in found.values():
        pool.worker()  # an error in a configuration is reported before Ray is waited for
    _connect(address, stop)
    try:
        if not deployed:
            policy = described.get("autoscaling")
            scaled = None if policy is None else sources.load(ServeAutoscalingConfig, policy)
            deploy(found, described.get("environment", {}), scaled)
            say("pools are deployed")
        write_ready(ready_file, {"pid": os.getpid()})
        stop.wait()
    except RuntimeError as error:
        raise SetupError(f"the pools did not start: {error}") from error
    finally:
        shutdown()
        ray.shutdown()


def _connect(address: str, stop: threading.Event) -> None:
    """Ray may be starting: it is waited for. Raises SetupError."""
    import ray

    deadline = time.monotonic() + RAY_SECONDS
    while True:
        try:
            ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
            return
        except (ConnectionError, RuntimeError, ValueError) as error:
            if stop.wait(RETRY_SECONDS) or time.monotonic() > deadline:
                raise SetupError(f"no Ray at {address}: {error}", field="address") from error


def _read(config: Path) -> dict[str, Any]:
    try:
        described: dict[str, Any] = json.loads(config.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{config}: {error}", field="config") from error
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
    say(f"{name} at {dashboard} is told to leave")


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
    try:
        return call()
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
        time.sleep(LOOK_SECONDS)
