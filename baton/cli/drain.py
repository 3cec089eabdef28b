"""`baton drain`: a worker leaves, and nobody who is being served notices."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from baton.cli.flags import Flags
from baton.cli.output import console, say
from baton.cli.serve import ConfigFile
from baton.draining import Drainer, Process, wait_exit
from cluster.config import sources
from cluster.config.shared import ClusterFields
from cluster.config.yaml_file import read_settings
from cluster.errors import ConfigError, DeadlineError, UnavailableError
from cluster.membership.types import Then

EXIT_STILL_DRAINING = 3


CLUSTER = Flags(ClusterFields)


@CLUSTER.add_to
def drain(
    worker: Annotated[
        list[str] | None, typer.Argument(help="Worker ids, as baton status shows them.")
    ] = None,
    this: Annotated[
        bool, typer.Option("--self", help="What runs in this pod or on this host (for a preStop hook).")
    ] = False,
    wait: Annotated[float, typer.Option(min=0, help="Seconds to wait until it has left; 0 = don't.")] = 0.0,
    config: ConfigFile = None,
    worker_id: Annotated[
        str | None, typer.Option(envvar="BATON_WORKER_ID", help="With --self: this worker.")
    ] = None,
    ready_file: Annotated[
        Path | None,
        typer.Option(envvar="BATON_READY_FILE", help="With --self: the process that wrote this file."),
    ] = None,
    **flags: Any,
) -> None:
    """Let workers leave: nothing new is placed on them, what runs finishes or goes on elsewhere, then they end.

    Exit code 0: told, and with --wait gone. 3: still draining when the wait was over. 1: nobody could be told.
    """
    if bool(worker) == this:
        raise ConfigError("name workers, or say --self", field="worker")
    registry = sources.load(ClusterFields, CLUSTER.values(ClusterFields, flags), values=_of_registry(config))
    try:
        if this:
            _drain_self(registry, wait, worker_id, ready_file)
        else:
            _drain(Drainer(registry, say), list(worker or ()), wait, "exit")
    except DeadlineError as error:
        say(f"baton: {error.message}")
        raise typer.Exit(EXIT_STILL_DRAINING) from None


def _of_registry(config: Path | None) -> dict[str, Any]:
    """A worker's own configuration file names its Redis."""
    if config is None:
        return {}
    read = read_settings(config)
    return {name: value for name, value in read.items() if name in ClusterFields.model_fields}


def _drain(drainer: Drainer, workers: list[str], wait: float, then: Then) -> None:
    drainer.tell(workers, then)
    if wait > 0:
        with console.status("draining") as status:
            drainer.wait(workers, wait, then, lambda line: status.update(line or "draining"))


def _drain_self(registry: ClusterFields, wait: float, worker_id: str | None, ready_file: Path | None) -> None:
    """By its ready file, its name, or its host; without Redis the process is told directly: SIGTERM drains as well."""
    process = Process.read(ready_file) if ready_file is not None and ready_file.exists() else None
    if process is not None and process.role == "router":
        _terminate(process, wait)
        return
    try:
        drainer = Drainer(registry, say)
        found = [process.id] if process is not None else [worker_id] if worker_id else drainer.on_this_host()
        if not found:
            raise ConfigError("no worker of this host is registered: nothing to drain", field="self")
        _drain(drainer, found, wait, "stay")
    except (UnavailableError, ConfigError):
        if process is None:
            raise
        _terminate(process, wait)
        return
    if process is not None and wait > 0:
        wait_exit(process, wait)


def _terminate(process: Process, wait: float) -> None:
    say(
        f"{process.id} (pid {process.pid}) is told to leave"
        if process.runs()
        else f"{process.id} has left already"
    )
    process.terminate()
    if wait > 0:
        wait_exit(process, wait)
        say(f"{process.id} has left")
