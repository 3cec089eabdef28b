"""`baton selftest`: what `helm test` runs, one check per Job."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Annotated

import httpx
import typer

from baton.cli.client_commands import ApiKey, Grpc, Http, TlsCa, TlsCert, TlsKey, client_tls
from baton.cli.output import console, say
from baton.client import Client
from baton.client.types import Completion
from cluster.errors import BatonError, InternalError, UnavailableError
from cluster.security.tls import ClientTls
from loadgen.config import LoadConfig

PROBE_SECONDS = 5.0
PAUSE_SECONDS = 0.5
REQUEST_SECONDS = 60.0
ANSWER_TOKENS = 8
# Length of prompts: several full KV blocks, and long enough for the router to prefer a hand-off.
PROMPT_TOKENS = 512
TOGETHER = 4

selftest = typer.Typer(help="Check a running cluster from outside, as helm test does.", no_args_is_help=True)
Seconds = Annotated[float, typer.Option(min=0.0, help="Limit of the wait, in seconds.")]


@selftest.callback()
def _connect(
    context: typer.Context,
    url: Http = "http://127.0.0.1:8000",
    target: Grpc = "127.0.0.1:50051",
    api_key: ApiKey = "",
    tls_ca: TlsCa = None,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
) -> None:
    """Check a running cluster from outside, as helm test does."""
    tls = client_tls(tls_ca, tls_cert, tls_key)
    context.obj = RouterEndpoints(url, tuple(target.split(",")), api_key, tls)


@selftest.command()
def health(context: typer.Context, seconds: Seconds = 60.0) -> None:
    """Both ports answer, and there are workers behind them."""
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
    seconds: Annotated[float, typer.Option(min=0.1, help="Duration of the load.")] = 10.0,
    rate: Annotated[float, typer.Option(min=0.01, help="Requests per second.")] = 2.0,
) -> None:
    """A short load run in which no request fails."""
    say(check_load(context.obj, seconds, rate))


@dataclass(frozen=True)
class RouterEndpoints:
    """Addresses and credentials for the routers."""

    url: str
    targets: tuple[str, ...]
    api_key: str = ""
    tls: ClientTls | None = None

    def client(self) -> Client:
        return Client(self.targets, api_key=self.api_key, tls=self.tls, timeout_seconds=REQUEST_SECONDS)


def check_health(endpoints: RouterEndpoints, seconds: float) -> str:
    """Check that both ports answer and workers can prefill and decode. Raises UnavailableError after `seconds`."""
    address = endpoints.url.rstrip("/")
    verify = endpoints.tls.context() if endpoints.tls is not None else True
    why = "it did not answer"
    with httpx.Client(timeout=PROBE_SECONDS, trust_env=False, verify=verify) as http:
        for _ in _until(seconds):
            try:
                answer = http.get(f"{address}/ready")
            except httpx.HTTPError as error:
                why = str(error)
                continue
            if answer.status_code == 200:
                with endpoints.client() as client:
                    models = client.models()
                return f"{address} is ready and serves {', '.join(model.id for model in models)}"
            why = answer.text
    raise UnavailableError(f"{address} was not ready within {seconds:.0f} s: {why}", field="url")


def check_generation(endpoints: RouterEndpoints) -> str:
    """Check that one prompt is continued, token by token."""
    with endpoints.client() as client:
        answer = _generate(client, _prompt(client, PROMPT_TOKENS // 8))
    if not answer.token_ids:
        raise InternalError("the answer has no tokens")
    return f"{len(answer.token_ids)} tokens in {answer.timings.total_seconds:.3f} s"


def check_prefix_hit(endpoints: RouterEndpoints, seconds: float) -> str:
    """A prompt that was sent before is not computed again. Raises InternalError when it is, for `seconds`."""
    with endpoints.client() as client:
        prompt = _prompt(client, PROMPT_TOKENS)
        _generate(client, prompt)
        for _ in _until(seconds):  # workers report cached prefixes in intervals
            usage = _generate(client, prompt).usage
            if usage.cached_tokens > 0:
                return f"{usage.cached_tokens} of {usage.prompt_tokens} prompt tokens were cached"
    raise InternalError(f"no prefix hit within {seconds:.0f} s")


def check_handoff(endpoints: RouterEndpoints, seconds: float, transport: str) -> str:
    """KV moves from a prefill to a decode worker, over `transport` if it is named.

    The router may let a decode worker prefill by itself when that is quicker, so prompts are sent together until one
    is handed over. Raises InternalError when none is within `seconds`.
    """
    seen = "no request was handed over"
    with endpoints.client() as client, ThreadPoolExecutor(TOGETHER) as pool:
        for _ in _until(seconds):
            prompts = [_prompt(client, PROMPT_TOKENS) for _ in range(TOGETHER)]
            for answer in pool.map(lambda prompt: _generate(client, prompt), prompts):
                timings = answer.timings
                if timings.kv_bytes_shipped == 0:
                    continue
                if transport in ("", timings.transport):
                    way = ""
                    if timings.decode_worker:  # empty unless the key is an admin's
                        way = f" from {timings.prefill_worker} to {timings.decode_worker}"
                    return f"{timings.kv_bytes_shipped} bytes of KV went{way} over {timings.transport}"
                seen = f"KV went over {timings.transport}"
    wanted = f" over {transport}" if transport else ""
    raise InternalError(f"no hand-off{wanted} within {seconds:.0f} s: {seen}")


def check_load(endpoints: RouterEndpoints, seconds: float, rate: float) -> str:
    """Run an open loop of `rate` requests per second. Raises InternalError if any request fails."""
    from loadgen.load import run_all
    from loadgen.table import print_report

    tls = endpoints.tls or ClientTls()
    with endpoints.client() as client:
        share = max(1, client.models()[0].max_model_len // 16)  # texts may be longer than requested
    config = LoadConfig(
        targets=endpoints.targets,
        rate=rate,
        seconds=seconds,
        workload="shared",
        prefix_tokens=min(256, share),
        prompt_tokens=min(64, share),
        max_tokens=min(32, share),
        api_key=endpoints.api_key,
        tls=endpoints.tls is not None,
        tls_ca=tls.ca,
        tls_cert=tls.cert,
        tls_key=tls.key,
    )
    report = asyncio.run(run_all([config], console=console))
    print_report(report, console)
    if report.failed or not report.requests:
        raise InternalError(f"{report.failed} of {report.requests} requests failed")
    return f"{report.requests} requests, none failed"


def _until(seconds: float) -> Iterator[None]:
    """Iterate at least once, then with pauses until the deadline."""
    deadline = time.monotonic() + seconds
    while True:
        yield
        if time.monotonic() + PAUSE_SECONDS > deadline:
            return
        time.sleep(PAUSE_SECONDS)


def _generate(client: Client, prompt: list[int]) -> Completion:
    return client.generate(prompt, max_tokens=ANSWER_TOKENS, temperature=0.0, ignore_eos=True)


def _prompt(client: Client, tokens: int) -> list[int]:
    """Return random token ids of a new prompt, at most a quarter of the model's context."""
    limit = client.models()[0].max_model_len // 4
    words = " ".join(secrets.token_hex(2) for _ in range(tokens))
    try:
        return client.tokenize(f"{secrets.token_hex(8)} {words}")[: max(1, min(tokens, limit))]
    except BatonError as error:
        raise InternalError(f"the router can't tokenize: {error.message}") from error
