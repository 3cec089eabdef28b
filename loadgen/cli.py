"""`baton load`: flags made from the settings of a load, and what they become."""

from __future__ import annotations

import asyncio
import inspect
import re
import ssl
from collections.abc import Iterator, Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import orjson
import typer
from pydantic import ValidationError
from rich.console import Console

from loadgen.config import LoadConfig, Slo
from loadgen.reach import why_not_grpc, why_not_http, why_unreachable
from loadgen.tls import make_context

if TYPE_CHECKING:
    from loadgen.report import Report

# Flags by panel, each with the name of its setting, or of the one that _SETTINGS gives
_PANELS = {
    "Options": ("model",),
    "How requests arrive": ("rate", "arrival", "concurrency", "requests", "seconds", "warmup", "timeout"),
    "What they ask": (
        *("workload", "prompts", "prompt_tokens", "prompt_spread", "prefix_tokens", "prefixes", "turns"),
        *("think", "questions", "vocab_size", "max_tokens", "temperature", "ignore_eos", "seed"),
        *("extra_body", "api_key", "tls_ca", "tls_cert", "tls_key"),
    ),
    "What counts as good": ("slo_ttft", "slo_tpot", "slo_e2e"),
}
_SETTINGS = {
    "warmup": "warmup_requests",
    "timeout": "timeout_seconds",
    "prompts": "prompt_kind",
    "think": "think_seconds",
    **{f"slo_{name.removesuffix('_seconds')}": name for name in Slo.model_fields},
}
_VARIABLES = {"api_key": "BATON_API_KEY"} | {
    f"tls_{file}": f"BATON_CLIENT_TLS_{file.upper()}" for file in ("ca", "cert", "key")
}
_FLAGS = {_SETTINGS.get(name, name): name for names in _PANELS.values() for name in names}
_URLS = ("http://", "https://")
# Flags that are not read as their setting's type
_READ_AS: dict[str, tuple[Any, Any]] = {"questions": (Path | None, None), "extra_body": (str, "{}")}


class ProtocolName(StrEnum):
    """Protocol, in the form that typer takes for the items of a list."""

    GRPC = "grpc"
    HTTP = "http"


def load(
    protocol: Annotated[
        list[ProtocolName],
        typer.Option(help="grpc is Baton's own, http any OpenAI server's. Both: half of the load each."),
    ] = [ProtocolName.GRPC],  # noqa: B006 (typer wants a list, and copies it)
    target: Annotated[
        list[str] | None,
        typer.Option(
            help="Server, such as 127.0.0.1:50051 or http://127.0.0.1:8000; conversations use several in turn. "
            "With two protocols, http://… targets belong to http."
        ),
    ] = None,
    json: Annotated[Path | None, typer.Option(help="Write the figures to this file.")] = None,
    html: Annotated[Path | None, typer.Option(help="Write a page with plots to this file.")] = None,
    **flags: Any,
) -> None:
    """Offer a server a load, and report what its clients saw.

    Latencies count from the time at which a request was due, so a server that stalls cannot hide the requests that it
    delayed. Figures that the server reports itself (stages, cached tokens, shipped KV) are shown where it reports them.
    """
    _check_writable({"--json": json, "--html": html})
    configs = _configs(list(dict.fromkeys(protocol)), target or [], flags)
    _check_due(configs)
    _check_reachable(configs)
    # Imported here: every `baton` command reads this file for its help.
    from loadgen.key_watch import KeyRefused
    from loadgen.load import run_all
    from loadgen.table import print_report

    console = Console()
    try:
        report = asyncio.run(run_all(configs, console=console))
    except KeyRefused as refused:
        raise typer.BadParameter(
            f"--api-key: all targets refused it: {refused}; set --api-key or BATON_API_KEY"
        ) from None
    print_report(report, console)
    _write_files(report, json, html)
    if report.failed == report.requests:
        raise typer.Exit(1)


def _with_flags() -> Iterator[inspect.Parameter]:
    """The parameters of `load`, with one for each flag in place of `flags`."""
    *own, _ = inspect.signature(load, eval_str=True).parameters.values()
    yield from own
    fields = LoadConfig.model_fields | Slo.model_fields
    for panel, names in _PANELS.items():
        for name in names:
            field = fields[_SETTINGS.get(name, name)]
            kind, default = _READ_AS.get(name, (field.annotation, field.default))
            option = typer.Option(
                f"--{name.replace('_', '-')}",
                help=field.description,
                rich_help_panel=panel,
                envvar=_VARIABLES.get(name),
            )
            yield inspect.Parameter(
                name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[kind, option]
            )


_PARAMETERS = list(_with_flags())
load.__signature__ = inspect.Signature(_PARAMETERS)  # type: ignore[attr-defined]
load.__annotations__ = {one.name: one.annotation for one in _PARAMETERS}


def _configs(protocols: list[ProtocolName], targets: list[str], flags: Mapping[str, Any]) -> list[LoadConfig]:
    """One for each protocol, among which the load is divided evenly."""
    settings = {_SETTINGS.get(name, name): value for name, value in flags.items()}
    settings["slo"] = {name: settings.pop(name) for name in Slo.model_fields}
    settings["questions"] = _lines(settings["questions"])
    rate, concurrency, requests, count = (
        flags["rate"],
        flags["concurrency"],
        flags["requests"],
        len(protocols),
    )
    if requests is None and flags["seconds"] is None:
        settings["seconds"] = 30.0
    try:
        settings["extra_body"] = orjson.loads(flags["extra_body"])
        return [
            LoadConfig.model_validate(
                {
                    **settings,
                    "protocol": protocol.value,
                    "targets": [
                        one for one in targets if count == 1 or one.startswith(_URLS) == (protocol == "http")
                    ],
                    "rate": rate and rate / count,
                    "concurrency": _part(concurrency, count, index),
                    "requests": requests and _part(requests, count, index),
                    "seed": flags["seed"] + index,
                }
            )
            for index, protocol in enumerate(protocols)
        ]
    except orjson.JSONDecodeError as error:
        raise typer.BadParameter(f"--extra-body: {error}") from error
    except ValidationError as error:
        wrong = (_problem(item["loc"], item["msg"]) for item in error.errors())
        raise typer.BadParameter("; ".join(wrong)) from error


def _problem(where: Sequence[int | str], said: str) -> str:
    """An error of pydantic about a setting, with its flag's name."""
    said = re.sub(r"`(\w+)`", lambda found: _flag(found[1]), said.removeprefix("Value error, "))
    named = [one for one in where if isinstance(one, str)]
    return f"{_flag(named[-1])}: {said}" if named else said


def _flag(setting: str) -> str:
    return f"--{_FLAGS.get(setting, setting).replace('_', '-')}"


def _part(total: int, count: int, index: int) -> int:
    """One of `count` shares of `total`: at least 1 each, unless there is nothing to share."""
    return max(min(1, total), total // count + (1 if index < total % count else 0))


def _write_files(report: Report, json_file: Path | None, html_file: Path | None) -> None:
    """Write the files that are asked for."""
    from loadgen.html import page

    if json_file is not None:
        _save(json_file, orjson.dumps(report.to_json(), option=orjson.OPT_INDENT_2) + b"\n")
    if html_file is not None:
        _save(html_file, page(report).encode())


def _save(file: Path, content: bytes) -> None:
    try:
        file.write_bytes(content)
    except OSError as error:  # the error of a full disk names no file
        raise OSError(error.errno, error.strerror, str(file)) from error


def _check_writable(files: Mapping[str, Path | None]) -> None:
    """Fail before the run if a report could not be saved after it. Creates nothing: a misspelt folder is a mistake."""
    for flag, file in files.items():
        if file is None:
            continue
        try:
            if not file.parent.exists():
                raise typer.BadParameter(
                    f"{flag} {file} cannot be written: there is no folder {file.parent}; make it, or name another"
                )
            new = not file.exists()
            file.open("ab").close()
            if new:
                file.unlink()
        except OSError as error:
            raise typer.BadParameter(f"{flag} {file} cannot be written: {error.strerror}") from None


def _check_due(configs: list[LoadConfig]) -> None:
    """Fail before a run in which no request is due: it would end at once, with empty tables."""
    from loadgen.schedule import session_schedule

    # With this many expected none is due once in e^50 runs: a long schedule is not made twice.
    if any(one.rate is None or one.seconds is None or one.rate * one.seconds > 50 for one in configs):
        return
    if not any(session_schedule(one) for one in configs):
        raise typer.BadParameter(
            f"no request is due at --rate {sum(one.rate or 0.0 for one in configs):g} within --seconds "
            f"{configs[0].seconds:g}: give a higher rate, or more seconds"
        )


def _check_reachable(configs: list[LoadConfig]) -> None:
    """Fail before the run if no target can be connected to, or none of a protocol serves it: all requests would fail."""
    for config in configs:
        wrong = [_why_not(config, address) for address in config.addresses]
        if all(wrong):
            raise typer.BadParameter(f"--target {config.addresses[0]}: {wrong[0]}")
    reasons = {address: why_unreachable(address) for config in configs for address in config.addresses}
    if all(reasons.values()):
        address, reason = next(iter(reasons.items()))
        raise typer.BadParameter(
            f"--target {address}: nothing answers there ({reason}). `baton up` starts a cluster on this machine"
        )


def _why_not(config: LoadConfig, address: str) -> str:
    context = _context(config, address)
    if config.protocol == "http":
        return why_not_http(address, tls=context)
    found = why_not_grpc(address, tls=context)
    if found is None:
        return ""
    return f"{found.reason}; --protocol http loads an HTTP port" if found.is_http else found.reason


def _context(config: LoadConfig, address: str) -> ssl.SSLContext | None:
    """The TLS context for clients of `address`; None without TLS: making one reads certificates, which takes 20 ms."""
    if not config.has_tls and not address.startswith("https://"):
        return None
    try:
        return make_context(config)
    except OSError as error:  # ssl.SSLError is one
        files = {"--tls-ca": config.tls_ca, "--tls-cert": config.tls_cert, "--tls-key": config.tls_key}
        named = ", ".join(f"{flag} {file}" for flag, file in files.items() if file is not None)
        raise typer.BadParameter(f"{named} cannot be read: {error.strerror or error}") from None


def _lines(file: Path | None) -> tuple[str, ...]:
    if file is None:
        return ()
    try:
        text = file.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise typer.BadParameter(f"--questions {file} cannot be read: {error}") from None
    return tuple(line.strip() for line in text.splitlines() if line.strip())
