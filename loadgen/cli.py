"""`baton load`: flags, and what they become."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import orjson
import typer
from pydantic import ValidationError
from rich.console import Console

from loadgen.config import Arrival, LoadConfig, PromptKind, Protocol, WorkloadName

if TYPE_CHECKING:
    from loadgen.report import Report


class ProtocolName(StrEnum):
    """Protocol, as typer wants the items of a list."""

    GRPC = "grpc"
    HTTP = "http"


_ARRIVE, _ASK, _JUDGE, _TELL = "How requests arrive", "What they ask", "What counts as good", "Where it goes"

Protocols = Annotated[
    list[ProtocolName],
    typer.Option(
        "--protocol",
        help="grpc is Baton's own, http any OpenAI server. Give both to load both at once, half each.",
    ),
]
Targets = Annotated[
    list[str] | None,
    typer.Option(
        "--target",
        help="Server, e.g. 127.0.0.1:50051 or http://127.0.0.1:8000; several: conversations take turns. "
        "With two protocols, http://… targets belong to http.",
    ),
]
Rate = Annotated[
    float | None,
    typer.Option(
        help="Open loop: requests a second, due on a schedule made beforehand. A slow server does not slow "
        "them down, and waiting counts. Without it, a closed loop.",
        rich_help_panel=_ARRIVE,
    ),
]
ArrivalOption = Annotated[
    Arrival,
    typer.Option(help="Open loop: poisson is what independent users do.", rich_help_panel=_ARRIVE),
]
Concurrency = Annotated[
    int,
    typer.Option(
        help="Closed loop: users who each wait for their answer and ask again at once. Shows the most a "
        "server gives, not what users would wait.",
        rich_help_panel=_ARRIVE,
    ),
]
Requests = Annotated[int | None, typer.Option(help="Stop after so many.", rich_help_panel=_ARRIVE)]
Seconds = Annotated[
    float | None, typer.Option(help="Or: start none later than this [30].", rich_help_panel=_ARRIVE)
]
Warmup = Annotated[
    int, typer.Option(help="Requests before, one by one, not counted.", rich_help_panel=_ARRIVE)
]
Timeout = Annotated[float, typer.Option(help="Deadline of a request, seconds.", rich_help_panel=_ARRIVE)]
Workload = Annotated[
    WorkloadName,
    typer.Option(
        help="plain: nothing in common. shared: one system prompt, then something of its own. conversation: "
        "each question follows everything said before.",
        rich_help_panel=_ASK,
    ),
]
Kind = Annotated[
    PromptKind | None,
    typer.Option(
        "--prompts",
        help="text and chat have about the length asked for, tokens exactly.",
        rich_help_panel=_ASK,
    ),
]
PromptTokens = Annotated[int, typer.Option(help="Length of a prompt's own part.", rich_help_panel=_ASK)]
Spread = Annotated[float, typer.Option(help="Vary it evenly by this share.", rich_help_panel=_ASK)]
PrefixTokens = Annotated[int, typer.Option(help="shared: length of the system prompt.", rich_help_panel=_ASK)]
Prefixes = Annotated[int, typer.Option(help="shared: how many different ones.", rich_help_panel=_ASK)]
Turns = Annotated[int, typer.Option(help="conversation: questions each.", rich_help_panel=_ASK)]
Think = Annotated[float, typer.Option(help="conversation: pause between, seconds.", rich_help_panel=_ASK)]
Questions = Annotated[
    Path | None, typer.Option(help="conversation: a file with one question a line.", rich_help_panel=_ASK)
]
VocabSize = Annotated[int, typer.Option(help="tokens: ids stay below this.", rich_help_panel=_ASK)]
MaxTokens = Annotated[int, typer.Option(help="Longest answer.", rich_help_panel=_ASK)]
Temperature = Annotated[float, typer.Option(help="0 = greedy.", rich_help_panel=_ASK)]
IgnoreEos = Annotated[
    bool,
    typer.Option("--ignore-eos", help="Every answer as long as that (Baton, vLLM).", rich_help_panel=_ASK),
]
Seed = Annotated[int, typer.Option(help="Same seed, same prompts and same schedule.", rich_help_panel=_ASK)]
ExtraBody = Annotated[str, typer.Option(help="http: more fields for the body, JSON.", rich_help_panel=_ASK)]
SloTtft = Annotated[
    float | None, typer.Option(help="First token within so many seconds.", rich_help_panel=_JUDGE)
]
SloTpot = Annotated[
    float | None, typer.Option(help="Seconds a token after it, on average.", rich_help_panel=_JUDGE)
]
SloE2e = Annotated[float | None, typer.Option(help="Last token within so many.", rich_help_panel=_JUDGE)]
ApiKey = Annotated[
    str, typer.Option(envvar="BATON_API_KEY", help="Where the server asks for one.", rich_help_panel=_ASK)
]
TlsCa = Annotated[
    Path | None,
    typer.Option(envvar="BATON_CLIENT_TLS_CA", help="Speak TLS; trust this authority.", rich_help_panel=_ASK),
]
JsonFile = Annotated[Path | None, typer.Option("--json", help="Write the figures.", rich_help_panel=_TELL)]
HtmlFile = Annotated[
    Path | None,
    typer.Option("--html", help="Write a page with plots, all in one file.", rich_help_panel=_TELL),
]


# Flags that are settings of the same name.
_SAME_NAMES = (
    "model", "arrival", "workload", "prompt_tokens", "prompt_spread", "prefix_tokens", "prefixes", "turns",
    "vocab_size", "max_tokens", "temperature", "ignore_eos", "api_key", "tls_ca",
)  # fmt: skip


def load(
    protocol: Protocols = [ProtocolName.GRPC],  # noqa: B006 (typer wants a list, and copies it)
    target: Targets = None,
    model: Annotated[str, typer.Option(help="Default: the first one served.")] = "",
    rate: Rate = None,
    arrival: ArrivalOption = "poisson",
    concurrency: Concurrency = 8,
    requests: Requests = None,
    seconds: Seconds = None,
    warmup: Warmup = 0,
    timeout: Timeout = 120.0,
    workload: Workload = "plain",
    prompts: Kind = None,
    prompt_tokens: PromptTokens = 256,
    prompt_spread: Spread = 0.0,
    prefix_tokens: PrefixTokens = 256,
    prefixes: Prefixes = 1,
    turns: Turns = 4,
    think: Think = 0.0,
    questions: Questions = None,
    vocab_size: VocabSize = 4096,
    max_tokens: MaxTokens = 64,
    temperature: Temperature = 0.0,
    ignore_eos: IgnoreEos = False,
    seed: Seed = 0,
    extra_body: ExtraBody = "{}",
    slo_ttft: SloTtft = None,
    slo_tpot: SloTpot = None,
    slo_e2e: SloE2e = None,
    json: JsonFile = None,
    html: HtmlFile = None,
    api_key: ApiKey = "",
    tls_ca: TlsCa = None,
) -> None:
    """Offer a server a load, and report what its clients saw.

    Latencies count from the moment a request was due, so a server that stalls cannot hide the requests it
    held up. Figures the server reports itself (stages, cached tokens, shipped KV) appear where it does.
    """
    given = dict(locals())
    _check_writable({"--json": json, "--html": html})
    shares = _shares(protocol, target or [], rate, concurrency, requests)
    settings: dict[str, object] = {name: given[name] for name in _SAME_NAMES} | {
        "seconds": 30.0 if requests is None and seconds is None else seconds,
        "warmup_requests": warmup,
        "timeout_seconds": timeout,
        "prompt_kind": prompts,
        "think_seconds": think,
        "questions": _lines(questions),
        "slo": {"ttft_seconds": slo_ttft, "tpot_seconds": slo_tpot, "e2e_seconds": slo_e2e},
    }
    _finish(_run(_configs(shares, settings, extra_body, seed)), json, html)


def _configs(
    shares: list[dict[str, object]], settings: dict[str, object], extra_body: str, seed: int
) -> list[LoadConfig]:
    try:
        body = orjson.loads(extra_body)
        return [
            LoadConfig.model_validate({**settings, **share, "extra_body": body, "seed": seed + index})
            for index, share in enumerate(shares)
        ]
    except (ValidationError, orjson.JSONDecodeError) as error:
        raise typer.BadParameter(_sentence(error)) from error


def _run(configs: list[LoadConfig]) -> Report:
    # Imported here: every `baton` command reads this file for its help.
    from loadgen.load import run_all
    from loadgen.table import print_report

    console = Console()
    report = asyncio.run(run_all(configs, console=console))
    print_report(report, console)
    return report


def _finish(report: Report, json_file: Path | None, html_file: Path | None) -> None:
    write_files(report, json_file, html_file)
    if report.failed == report.requests:
        raise typer.Exit(1)


def write_files(report: Report, json_file: Path | None, html_file: Path | None) -> None:
    """Writes what is asked for, making folders on the way."""
    from loadgen.html import page

    if json_file is not None:
        _save(json_file, orjson.dumps(report.to_json(), option=orjson.OPT_INDENT_2) + b"\n")
    if html_file is not None:
        _save(html_file, page(report).encode())


def _save(file: Path, content: bytes) -> None:
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content)
    except OSError as error:  # a disk that filled up meanwhile names no file
        raise OSError(error.errno, error.strerror, str(file)) from error


def _shares(
    asked: list[ProtocolName],
    targets: list[str],
    rate: float | None,
    concurrency: int,
    requests: int | None,
) -> list[dict[str, object]]:
    """The load divided evenly between the protocols."""
    protocols: list[Protocol] = [name.value for name in dict.fromkeys(asked)]
    count = len(protocols)
    shares: list[dict[str, object]] = []
    for index, protocol in enumerate(protocols):
        own = [item for item in targets if count == 1 or item.startswith("http") == (protocol == "http")]
        share: dict[str, object] = {"protocol": protocol, "targets": tuple(own)}
        share["rate"] = rate / count if rate is not None else None
        share["concurrency"] = _part(concurrency, count, index)
        share["requests"] = _part(requests, count, index) if requests is not None else None
        shares.append(share)
    return shares


def _part(total: int, count: int, index: int) -> int:
    """One of `count` shares of `total`: at least 1 each, unless there is nothing to share."""
    return max(min(1, total), total // count + (1 if index < total % count else 0))


def _check_writable(files: Mapping[str, Path | None]) -> None:
    """Fail before the run if a report could not be saved after it. Creates missing parent folders, and no file."""
    for flag, file in files.items():
        if file is None:
            continue
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            new = not file.exists()
            file.open("ab").close()
            if new:
                file.unlink()
        except OSError as error:
            raise typer.BadParameter(f"{flag} {file} cannot be written: {error.strerror}") from None


def _lines(file: Path | None) -> tuple[str, ...]:
    if file is None:
        return ()
    try:
        text = file.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise typer.BadParameter(f"--questions {file} cannot be read: {error}") from None
    return tuple(line.strip() for line in text.splitlines() if line.strip())


def _sentence(error: Exception) -> str:
    if isinstance(error, ValidationError):
        return "; ".join(f"{'.'.join(map(str, item['loc']))}: {item['msg']}" for item in error.errors())
    return f"--extra-body: {error}"
