"""`baton selftest`: what `helm test` runs, one check a Job."""

from __future__ import annotations

from typing import Annotated

import typer

from baton.cli.output import say
from baton.cli.talk import ApiKey, Grpc, Http, TlsCa, TlsCert, TlsKey
from baton.selftest import (
    RouterEndpoints,
    check_generation,
    check_handoff,
    check_health,
    check_load,
    check_prefix_hit,
)
from cluster.security.tls import ClientTls

selftest = typer.Typer(help="Check a running cluster from outside, as helm test does.", no_args_is_help=True)
Seconds = Annotated[float, typer.Option(min=0.0, help="How long to wait for it.")]


@selftest.callback()
def _doors(
    context: typer.Context,
    url: Http = "http://127.0.0.1:8000",
    target: Grpc = "127.0.0.1:50051",
    api_key: ApiKey = "",
    tls_ca: TlsCa = None,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
) -> None:
    """Check a running cluster from outside, as helm test does."""
    tls = ClientTls(tls_ca, tls_cert, tls_key) if tls_ca or tls_cert else None
    context.obj = RouterEndpoints(url, tuple(target.split(",")), api_key, tls)


@selftest.command()
def health(context: typer.Context, seconds: Seconds = 60.0) -> None:
    """Both doors answer, and there are workers behind them."""
    say(check_health(context.obj, seconds))


@selftest.command()
def generation(context: typer.Context) -> None:
    """A prompt is continued."""
    say(check_generation(context.obj))


@selftest.command("prefix-hit")
def prefix_hit(context: typer.Context, seconds: Seconds = 60.0) -> None:
    """A prompt that is sent twice is computed once."""
    say(check_prefix_hit(context.obj, seconds))


@selftest.command()
def handoff(
    context: typer.Context,
    transport: Annotated[str, typer.Option(help="nixl | grpc; empty: any.")] = "nixl",
    seconds: Seconds = 120.0,
) -> None:
    """KV is handed over from a prefill worker to a decode worker."""
    say(check_handoff(context.obj, seconds, transport))


@selftest.command()
def load(
    context: typer.Context,
    seconds: Annotated[float, typer.Option(min=0.1, help="How long to ask.")] = 10.0,
    rate: Annotated[float, typer.Option(min=0.01, help="Requests a second.")] = 2.0,
) -> None:
    """A short load run in which no request fails."""
    say(check_load(context.obj, seconds, rate))
