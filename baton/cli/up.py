"""`baton up`: a whole cluster on this machine."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from baton.cli.flags import Flags
from baton.cli.output import console, tell
from baton.local.cluster import LocalCluster
from baton.local.options import UpOptions, merged
from baton.local.state import ClusterState
from cluster.config.base import settings
from cluster.config.environment import from_environment, variables
from cluster.config.router import RouterConfig
from cluster.config.worker import WorkerConfig
from cluster.config.yaml_file import read_settings
from cluster.errors import ConfigError

WATCH_SECONDS = 0.2
# Ctrl-C, kill, a closed terminal
ENDINGS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def demo_model() -> Path:
    """The demo model: in the installed package, or in the source tree that this runs from."""
    packaged = Path(__file__).resolve().parents[1] / "demo_model"
    return packaged if packaged.is_dir() else packaged.parents[1] / "demo" / "model"


# Settings of single processes: `baton up` chooses them for each, or has a flag of its own in their place.
CHOSEN = {
    *(
        "model",
        "redis_url",
        "redis_password_file",
        "index_url",
        "index_password_file",
        "namespace",
        "secret_file",
        "tensor_parallel",
        "nodes",
        "ray_address",
    ),
    *("router_id", "worker_id", "host", "advertise_host", "port", "link_port", "metrics_port"),
    *("tls_cert", "tls_key", "tls_ca", "tls_client_ca", "public_tls_cert", "public_tls_key"),
}
SETTINGS = Flags(RouterConfig, WorkerConfig, without=CHOSEN)
# What sets the settings whose variables `baton up` refuses
INSTEAD = {
    "model": "baton up MODEL",
    "tensor_parallel": "--prefill-tp and --decode-tp",
    **dict.fromkeys(("tls_cert", "tls_key", "tls_ca", "tls_client_ca"), "--certs"),
    **dict.fromkeys(("public_tls_cert", "public_tls_key"), "--certs"),
}
# Settings of single processes, whose variables have no effect on a whole cluster
NOT_READ = CHOSEN - {"host", "advertise_host"} | {"role", "secret", "redis_password", "index_password"}


UP = Flags(UpOptions)


@SETTINGS.add_to
@UP.add_to
def up(
    directory: Annotated[
        Path | None,
        typer.Argument(metavar="[MODEL]", show_default=False, help="Model directory; the same as --model."),
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option(
            help="YAML of settings: those below under router: and worker:, of one role under prefill: or decode:."
        ),
    ] = None,
    **flags: Any,
) -> None:
    """Start a whole cluster here: Redis, routers, prefill and decode workers. Ctrl-C stops all of it.

    Every setting of routers and workers is a flag below; those of workers apply to both roles. --config sets them by role.

    Under load, requests enter by class (their priority: high, normal, batch), then by their tenants' weights (the keys
    file; see baton keys). A request that would be served too late is refused at once: 429 or RESOURCE_EXHAUSTED, with the
    time to come back.
    """
    from baton.local import preflight  # not for the help of other commands
    from baton.local.model_directory import check_directory

    given = [one for one in (directory, flags.pop("model", None)) if one is not None]
    if len(given) > 1:
        raise typer.BadParameter("the model is named twice, by [MODEL] and by --model")
    for one in given:
        check_directory(one.absolute(), "--model", str(one))
    if flags.get("max_model_len") == 0:  # in a file it is the default
        raise ConfigError(
            "--max-model-len 0 leaves no room for a prompt: give at least 1, or leave it out for the model's own length",
            field="max_model_len",
        )
    _refuse_variables()
    options = {
        "model": given[0].absolute() if given else demo_model(),
        **UP.values(UpOptions, flags),
        "router": merged(from_environment(RouterConfig, NOT_READ), SETTINGS.values(RouterConfig, flags)),
        "worker": merged(from_environment(WorkerConfig, NOT_READ), SETTINGS.values(WorkerConfig, flags)),
        "sections": read_settings(config) if config is not None else {},
    }
    made = UpOptions(**options)
    preflight.check(made)
    _forget_environment()
    run(made)


def _refuse_variables() -> None:
    """Raise ConfigError, which names the flag, for a variable of a setting that a flag sets here."""
    for model in (RouterConfig, WorkerConfig):
        for one in settings(model):
            if os.environ.get(one.environment) and one.path[-1] in INSTEAD:
                raise ConfigError(
                    f"{one.environment} is set, which baton up does not read: unset it, and use {INSTEAD[one.path[-1]]}",
                    field=".".join(one.path),
                )


def _forget_environment() -> None:
    """Each process gets its settings by a file, over which its environment would win: a flag would lose to a variable,
    and two routers would take the same ports."""
    for name in {*variables(RouterConfig), *variables(WorkerConfig)} - {"BATON_FAULT_ORDERS"}:
        del os.environ[name]


def run(options: UpOptions) -> None:
    """Start the cluster, wait for a signal, stop the cluster."""
    # No Event: a signal that interrupts its `wait` would wait in `set` for a lock that this thread holds.
    signals: list[int] = []

    def interrupt(number: int, _: object) -> None:
        # Python drops the exception where it interrupts a finalizer, or a hook after a fork
        signals.append(number)
        _interrupt()

    for number in ENDINGS:
        if signal.getsignal(number) is not signal.SIG_IGN:  # so do nohup and a shell's background jobs
            signal.signal(number, interrupt)
    # The stack is filled within the first status line: writing that one's end may take as long as a terminal is held.
    with contextlib.suppress(KeyboardInterrupt), contextlib.ExitStack() as ends:
        with _shown("starting") as update:
            cluster = LocalCluster(options, progress=update)
            try:
                state = cluster.start()
            except BaseException as error:
                _ignore_endings()
                cluster.stop(keep_logs=isinstance(error, Exception))  # Ctrl-C is no failure to look into
                raise
            ends.callback(_stop, cluster)
        for line in ready_lines(state, options):
            tell(line)
        while not signals:
            for line in cluster.watch():
                tell(line)
            time.sleep(WATCH_SECONDS)
    tell("stopped")


def _stop(cluster: LocalCluster) -> None:
    _ignore_endings()
    with _shown("stopping"):
        cluster.stop()


def ready_lines(state: ClusterState, options: UpOptions) -> list[str]:
    """Return the next steps for a newcomer, one per line. The first line is for programs that wait for it."""
    router = options.router_config(0)
    body = json.dumps({"model": router.served_model_name, "prompt": "Once upon a time", "max_tokens": 32})
    curl = ["curl"]
    if options.certs:
        curl += _curl_files(options.certs, with_own=options.require_client_certs)
    if router.api_keys_file:
        curl.append("-H 'authorization: Bearer KEY'")
    curl += [f"{state.http}/v1/completions", "-H 'content-type: application/json'", f"-d {shlex.quote(body)}"]
    return [
        f"ready  http {state.http}  grpc {state.grpc}",
        f"page   {state.http}/ui",
        f"try    {' '.join(curl)}",
        f"logs   {state.logs}",
    ]


def _curl_files(certs: Path, *, with_own: bool) -> list[str]:
    files = {"--cacert": "ca.pem", **({"--cert": "client.pem", "--key": "client.key"} if with_own else {})}
    return [f"{flag} {shlex.quote(str(certs / name))}" for flag, name in files.items()]


@contextlib.contextmanager
def _shown(text: str) -> Iterator[Callable[[str], None]]:
    """Show a status line. As in `tell`, errors of the output are ignored."""
    status = console.status(text)
    with contextlib.suppress(OSError, SystemExit):
        status.start()
    try:
        yield status.update
    finally:
        with contextlib.suppress(OSError, SystemExit):
            status.stop()


def _interrupt(*_: object) -> None:
    """Each of ENDINGS stops the cluster, also in the middle of a start; a second one changes nothing."""
    _ignore_endings()
    raise KeyboardInterrupt


def _ignore_endings() -> None:
    """A stop that is interrupted leaves processes, and files that hold secrets."""
    for number in ENDINGS:
        signal.signal(number, signal.SIG_IGN)
