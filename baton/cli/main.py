"""`baton`: the command line."""

from __future__ import annotations

import errno
import os
import sys
from typing import NoReturn

import typer
from rich.console import Console

from baton.cli import serve, talk, up, worker
from baton.cli.autoscale import autoscale
from baton.cli.certs import certs
from baton.cli.doctor import doctor
from baton.cli.drain import drain
from baton.cli.fetch import fetch
from baton.cli.keys import keys
from baton.cli.selftest import selftest
from baton.cli.serve_app import serve_app
from cluster.errors import BatonError
from loadgen.cli import load

app = typer.Typer(
    name="baton",
    help="Serve large language models with prefill and decode on separate workers.",
    no_args_is_help=True,
    pretty_exceptions_show_locals=False,
    rich_markup_mode="rich",
)

app.command("up", rich_help_panel="A whole cluster here")(up.up)
app.command("status", rich_help_panel="Use and watch")(talk.status)
app.command("top", rich_help_panel="Use and watch")(talk.top)
app.command("generate", rich_help_panel="Use and watch")(talk.generate)
app.command("chat", rich_help_panel="Use and watch")(talk.chat)
app.command("load", rich_help_panel="Use and watch")(load)
app.add_typer(selftest, name="selftest", rich_help_panel="Use and watch")
app.command("drain", rich_help_panel="Use and watch")(drain)
app.command("fetch", rich_help_panel="Single processes")(fetch)
app.command("router", rich_help_panel="Single processes")(serve.router)
app.command("prefill", rich_help_panel="Single processes")(worker.prefill)
app.command("decode", rich_help_panel="Single processes")(worker.decode)
app.command("pools", rich_help_panel="Single processes")(serve.pools)
app.add_typer(serve_app, name="serve-app", rich_help_panel="Single processes")
app.command("autoscale", rich_help_panel="Single processes")(autoscale)


app.command("doctor", rich_help_panel="Kubernetes")(doctor)
app.command("certs", rich_help_panel="Security")(certs)
app.add_typer(keys, name="keys", rich_help_panel="Security")


def main() -> None:
    """Runs a command; an error of ours, or a full disk, is one sentence on stderr and exit code 1."""
    try:
        app()
    except BatonError as error:
        _fail(error.message + (f" [{error.field}]" if error.field else ""))
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        # Python writes what is left of the output when it exits, and would fail there once more
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        _fail(f"{error.filename or 'the output'} cannot be written: {error.strerror}")


def _fail(sentence: str) -> NoReturn:
    Console(stderr=True, highlight=False, markup=False, emoji=False).print(
        f"baton: {sentence}", soft_wrap=True
    )
    sys.exit(1)
