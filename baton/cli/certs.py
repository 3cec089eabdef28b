"""`baton certs`: certificates for a cluster of one's own."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from baton.cli.output import say


def certs(
    out: Annotated[Path, typer.Option(help="Directory for certificates and keys.")],
    host: Annotated[
        list[str] | None, typer.Option(help="Name or address under which clients reach a router; repeatable.")
    ] = None,
    days: Annotated[int, typer.Option(min=1, help="How long certificates are valid.")] = 365,
) -> None:
    """Make a development authority and certificates; again in the same directory: renew them."""
    from baton.local.certs import make_certs

    for file in make_certs(out, host or [], days):
        say(f"{file}")
