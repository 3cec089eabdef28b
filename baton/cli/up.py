"""`baton up`: a whole cluster on this machine."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Literal

import typer

from baton.cli.output import console, say
from baton.cli.overload import (
    AdmissionSeconds,
    BatchAging,
    MaxRequests,
    MaxRequestsPerTenant,
    RequestsPerMinute,
    TokensPerMinute,
    TtftBatch,
    TtftHigh,
    TtftNormal,
    take_limits,
)
from baton.cli.sizes import parse_bytes
from baton.local.cluster import LocalCluster
from baton.local.options import UpOptions
from cluster.config.models import LocalPrefill, MetricsAliases

WATCH_SECONDS = 0.2
# Ctrl-C, kill, a closed terminal
ENDINGS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
DEMO_MODEL = Path(__file__).resolve().parents[2] / "demo" / "model"

# Typer reads annotations: a Literal it would not understand in older versions is spelled as a choice here.
PoolChoice = Annotated[Literal["ray", "process"], typer.Option(help="Who runs the workers.")]
DtypeChoice = Annotated[Literal["auto", "float32", "bfloat16"], typer.Option(help="Weights and KV cache.")]
LocalChoice = Annotated[LocalPrefill, typer.Option(help="May a decode worker prefill by itself?")]


def up(
    model: Annotated[Path, typer.Option(help="Model directory (default: the demo model).")] = DEMO_MODEL,
    routers: Annotated[int, typer.Option(help="Routers; each takes the next ports.")] = 1,
    prefill: Annotated[int, typer.Option(help="Prefill workers.")] = 1,
    decode: Annotated[int, typer.Option(help="Decode workers.")] = 1,
    prefill_tp: Annotated[int, typer.Option(help="Tensor-parallel ranks of a prefill worker.")] = 1,
    decode_tp: Annotated[int, typer.Option(help="Tensor-parallel ranks of a decode worker.")] = 1,
    aggregated: Annotated[
        bool, typer.Option("--aggregated", help="Decode workers prefill everything.")
    ] = False,
    local_prefill: LocalChoice = "auto",
    pool: PoolChoice = "ray",
    dtype: DtypeChoice = "auto",
    max_model_len: Annotated[int, typer.Option(help="Longest context; 0 = the model's.")] = 0,
    kv_memory: Annotated[str, typer.Option(help="KV pool of one rank, e.g. 512MiB; 0 = a share.")] = "0",
    page_size: Annotated[int, typer.Option(help="Tokens in a KV block.")] = 16,
    max_batch_tokens: Annotated[int, typer.Option(help="Token budget of a step; 0 = by role.")] = 0,
    chunked_prefill: Annotated[bool, typer.Option(help="Split long prompts over steps.")] = True,
    served_model_name: Annotated[str, typer.Option(help="Name clients use.")] = "",
    threads_per_worker: Annotated[int, typer.Option(help="CPU threads of one rank.")] = 1,
    http_port: Annotated[int, typer.Option(help="OpenAI HTTP; 0 = any free port.")] = 8000,
    grpc_port: Annotated[int, typer.Option(help="gRPC; 0 = any free port.")] = 50051,
    api_keys_file: Annotated[
        Path | None, typer.Option(envvar="BATON_API_KEYS_FILE", help="API keys; see baton keys.")
    ] = None,
    certs: Annotated[
        Path | None, typer.Option(help="TLS everywhere, with the files baton certs made there.")
    ] = None,
    require_client_certs: Annotated[
        bool, typer.Option("--require-client-certs", help="Clients too must show a certificate.")
    ] = False,
    share_prefixes_across_tenants: Annotated[
        bool,
        typer.Option("--share-prefixes-across-tenants", help="Tenants hit each other's cached prefixes."),
    ] = False,
    autoscaling: Annotated[
        Path | None, typer.Option(help="YAML of the autoscaling policy: it sizes the pools (--pool ray).")
    ] = None,
    ttft_target_seconds_high: TtftHigh = None,
    ttft_target_seconds_normal: TtftNormal = None,
    ttft_target_seconds_batch: TtftBatch = None,
    admission_seconds: AdmissionSeconds = None,
    max_concurrent_requests: MaxRequests = None,
    max_concurrent_requests_per_tenant: MaxRequestsPerTenant = None,
    requests_per_minute_per_tenant: RequestsPerMinute = None,
    tokens_per_minute_per_tenant: TokensPerMinute = None,
    batch_aging_seconds: BatchAging = None,
    redis_url: Annotated[
        str,
        typer.Option(
            envvar="BATON_REDIS_URL",
            help="A Redis to use; default: an embedded one. With a password, give it by the environment: everybody "
            "on this machine can read command lines.",
        ),
    ] = "",
    otlp_endpoint: Annotated[str, typer.Option(help="Collector of traces, OTLP over HTTP.")] = "",
    trace_sample_ratio: Annotated[
        float | None, typer.Option(min=0, max=1, help="Share of requests traced; default: all.")
    ] = None,
    metrics_aliases: Annotated[
        MetricsAliases, typer.Option(help="vllm: vLLM's metric names beside Baton's.")
    ] = "none",
    state_file: Annotated[
        Path | None, typer.Option(help="Write ids, pids and addresses here (JSON).")
    ] = None,
) -> None:
    """Start a whole cluster here: Redis, routers, prefill and decode workers. Ctrl-C stops all of it.

    Under load, requests enter by class (their priority: high, normal, batch), then by their tenants' weights (the keys
    file; see baton keys). What would come too late is refused at once: 429 or RESOURCE_EXHAUSTED, with the time to
    come back.
    """
    given = dict(locals())  # every flag is the option of its name, but for the router's limits
    given["limits"] = take_limits(given)
    run(UpOptions(**{**given, "kv_memory": parse_bytes(kv_memory, "kv_memory")}))


def run(options: UpOptions) -> None:
    """Starts, says so, waits for a signal, stops."""
    stop = threading.Event()
    for number in ENDINGS:
        if signal.getsignal(number) is not signal.SIG_IGN:  # so do nohup and a shell's background jobs
            signal.signal(number, _interrupt)
    try:
        with _shown("starting") as update:
            cluster = LocalCluster(options, progress=update)
            try:
                state = cluster.start()
            except BaseException as error:
                _ignore_endings()
                cluster.stop(keep_logs=isinstance(error, Exception))  # Ctrl-C is no failure to look into
                raise
        _tell(f"ready  http {state.http}  grpc {state.grpc}")
        try:
            while not stop.wait(WATCH_SECONDS):
                for line in cluster.watch():
                    _tell(line)
        finally:
            _ignore_endings()
            with _shown("stopping"):
                cluster.stop()
    except KeyboardInterrupt:
        _tell("stopped")


@contextlib.contextmanager
def _shown(text: str) -> Iterator[Callable[[str], None]]:
    """A status line. Like `_tell`, it does without an output that takes nothing."""
    status = console.status(text)
    with contextlib.suppress(OSError):
        status.start()
    try:
        yield status.update
    finally:
        with contextlib.suppress(OSError):
            status.stop()


def _tell(line: str) -> None:
    """Output to a file on a full disk must not end the cluster."""
    with contextlib.suppress(OSError):
        say(line)


def _interrupt(*_: object) -> None:
    """Each of ENDINGS stops the cluster, also in the middle of a start; a second one changes nothing."""
    _ignore_endings()
    raise KeyboardInterrupt


def _ignore_endings() -> None:
    """A stop that is interrupted leaves processes, and files that hold secrets."""
    for number in ENDINGS:
        signal.signal(number, signal.SIG_IGN)
