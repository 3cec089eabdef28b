"""Use and watch a cluster: `baton status`, `baton top`, `baton generate`, `baton chat`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from baton.cli.output import console
from cluster.errors import BatonError, ConfigError, UnavailableError
from cluster.protocol.priority import PRIORITIES
from cluster.security.tls import ClientTls
from loadgen.reach import why_not_grpc, why_unreachable

if TYPE_CHECKING:
    from baton.client import Client

Http = Annotated[str, typer.Option("--url", help="A router's HTTP address.")]
ApiKey = Annotated[
    str,
    typer.Option(envvar="BATON_API_KEY", help="API key, where the routers require one.", show_default=False),
]
TlsCa = Annotated[
    Path | None, typer.Option(envvar="BATON_CLIENT_TLS_CA", help="Use TLS, and trust this authority.")
]
TlsCert = Annotated[
    Path | None,
    typer.Option(envvar="BATON_CLIENT_TLS_CERT", help="Client certificate, where the routers require one."),
]
TlsKey = Annotated[
    Path | None, typer.Option(envvar="BATON_CLIENT_TLS_KEY", help="Key of the client certificate.")
]
Grpc = Annotated[str, typer.Option("--target", help="A router's gRPC address; several with commas.")]


def status(
    url: Http = "http://127.0.0.1:8000",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    api_key: ApiKey = "",
    tls_ca: TlsCa = None,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
) -> None:
    """Show workers, load, KV use, hit rate and hand-offs."""
    from baton.cli.status_table import show

    show(url, as_json=as_json, api_key=api_key, tls=client_tls(tls_ca, tls_cert, tls_key))


def top(
    router: Annotated[str, typer.Option("--router", "--url", help="A router's HTTP address.")] = (
        "http://127.0.0.1:8000"
    ),
    interval: Annotated[float, typer.Option(min=0.1, help="Seconds between updates.")] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Print one frame and exit.")] = False,
    api_key: ApiKey = "",
    tls_ca: TlsCa = None,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
) -> None:
    """Watch workers, queues, KV, hand-offs and latencies live; q quits."""
    from baton.router_http import RouterHttp
    from baton.top import run

    with RouterHttp(router, api_key, client_tls(tls_ca, tls_cert, tls_key)) as connection:
        if once:
            run.once(connection, console)
        else:
            run.run(connection, console, interval)


def generate(
    prompt: Annotated[str, typer.Argument(help="Text to continue.")],
    target: Grpc = "127.0.0.1:50051",
    max_tokens: Annotated[int, typer.Option(help="New tokens at most.")] = 128,
    temperature: Annotated[float, typer.Option(help="0 = greedy.")] = 0.0,
    seed: Annotated[int | None, typer.Option(help="Repeats a sampled answer.")] = None,
    priority: Annotated[
        Literal["high", "normal", "batch"],
        typer.Option(help="Class of the request: under load a higher one goes first."),
    ] = "normal",
    api_key: ApiKey = "",
    tls_ca: TlsCa = None,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
) -> None:
    """Continue one prompt, streaming the text."""
    from baton.client import GenerateOptions
    from baton.formatting import answer_text

    with _client(target, api_key, client_tls(tls_ca, tls_cert, tls_key)) as client:
        options: GenerateOptions = {"max_tokens": max_tokens, "temperature": temperature}
        options["priority"] = PRIORITIES[priority]
        if seed is not None:
            options["seed"] = seed
        stream = client.stream(prompt, **options)
        for chunk in stream:
            text = answer_text(chunk.text) if console.is_terminal else chunk.text
            console.print(text, end="", soft_wrap=True)
    console.print()


def chat(
    target: Grpc = "127.0.0.1:50051",
    temperature: Annotated[float, typer.Option(help="0 = greedy.")] = 0.7,
    max_tokens: Annotated[int, typer.Option(help="Longest answer.")] = 512,
    api_key: ApiKey = "",
    tls_ca: TlsCa = None,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
) -> None:
    """Talk to the model."""
    from baton.chat import converse

    with _client(target, api_key, client_tls(tls_ca, tls_cert, tls_key)) as client:
        converse(client, temperature=temperature, max_tokens=max_tokens)


@contextlib.contextmanager
def _client(target: str, api_key: str, tls: ClientTls | None) -> Iterator[Client]:
    """A client of the routers at `target`. Raises what _check_reachable does, and UnavailableError where what listens
    there does not serve what routers do: a worker, or another protocol."""
    import grpc

    from baton.client import Client
    from cluster.rpc.errors import is_from_peer

    _check_reachable(target, tls)
    try:
        with Client(target.split(","), api_key=api_key, tls=tls) as client:
            yield client
    except BatonError as error:
        failed = error.__cause__
        if not isinstance(failed, grpc.RpcError) or is_from_peer(failed) or "certificate" in error.message:
            raise
        if failed.code() not in (grpc.StatusCode.UNIMPLEMENTED, grpc.StatusCode.UNAVAILABLE):
            raise
        raise UnavailableError(
            f"no router answers at {target} ({error.message}): name a router's gRPC port (50051 by default)",
            field="target",
        ) from error


def _check_reachable(targets: str, tls: ClientTls | None) -> None:
    """Raise UnavailableError if nothing listens at any of the addresses, ConfigError if none can be gRPC's: gRPC would try
    for a while, and say less."""
    context = tls.context() if tls is not None else None  # its files are looked at first
    wrong = [why_not_grpc(one, tls=context) for one in targets.split(",")]
    if wrong[0] is not None and all(wrong):
        raise ConfigError(f"--target {targets}: {wrong[0].reason}", field="target")
    reasons = [why_unreachable(one) for one in targets.split(",")]
    if all(reasons):
        raise UnavailableError(
            f"no router answers at {targets} ({reasons[0]}): `baton up` starts a cluster on this machine, --target names "
            f"another",
            field="target",
        )


def client_tls(ca: Path | None, cert: Path | None, key: Path | None) -> ClientTls | None:
    """The client's TLS files, from a command's flags; None: plain text."""
    return ClientTls(ca, cert, key) if ca or cert or key else None
