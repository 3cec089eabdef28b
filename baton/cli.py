"""`baton`: the command line."""

from __future__ import annotations

import sys

import typer
from rich.console import Console

from baton.commands import serve, talk, up
from baton.commands.certs import certs
from baton.commands.keys import keys
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
app.command("generate", rich_help_panel="Use and watch")(talk.generate)
app.command("chat", rich_help_panel="Use and watch")(talk.chat)
app.command("load", rich_help_panel="Use and watch")(load)
app.command("router", rich_help_panel="Single processes")(serve.router)
app.command("prefill", rich_help_panel="Single processes")(serve.prefill)
app.command("decode", rich_help_panel="Single processes")(serve.decode)
app.command("pools", rich_help_panel="Single processes")(serve.pools)


app.command("certs", rich_help_panel="Security")(certs)
app.add_typer(keys, name="keys", rich_help_panel="Security")


def main() -> None:
    """Runs a command; an error of ours is one sentence on stderr and exit code 1."""
    try:
        app()
    except BatonError as error:
        where = f" [{error.field}]" if error.field else ""
        Console(stderr=True, highlight=False, markup=False).print(
            f"baton: {error.message}{where}", soft_wrap=True
        )
        sys.exit(1)
