"""The report as tables in a terminal."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from rich import box
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from loadgen.record import STAGES
from loadgen.report import Report, Summary


def print_report(report: Report, console: Console) -> None:
    console.print(Group(*_parts(report)))


def _parts(report: Report) -> Iterator[RenderableType]:
    yield Text()
    latencies = {
        "TTFT  time to first token": report.ttft,
        "ITL   between tokens": report.itl,
        "TPOT  per later token": report.tpot,
        "E2E   to the last token": report.e2e,
    }
    yield _summaries("latency", ("p50", "p90", "p99", "mean", "max"), latencies)
    if report.stages:
        stages = {STAGES[stage]: summary for stage, summary in report.stages.items()}
        yield _summaries("where the server spent it", ("p50", "p99", "mean"), stages)
    yield _totals(report)
    messages, targets = report.error_messages(), report.error_targets()
    for kind, count in report.errors.items():
        where = ", ".join(filter(None, targets[kind]))
        yield Text(f"  {count} × {kind}{f' at {where}' if where else ''}", style="red")
        for message in filter(None, messages[kind]):
            yield Text(f"      {message}", style="red")


def _summaries(first: str, columns: Sequence[str], rows: Mapping[str, Summary]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, header_style="bold", pad_edge=False)
    table.add_column(first)
    for column in columns:
        table.add_column(column, justify="right")
    for name, summary in rows.items():
        cells = (milliseconds(getattr(summary, column)) if summary.count else "–" for column in columns)
        table.add_row(name, *cells)
    return table


def _totals(report: Report) -> Table:
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 1))
    table.add_column(style="dim")
    table.add_column()
    for name, value in totals(report):
        table.add_row(name, value)
    return table


def totals(report: Report) -> Iterator[tuple[str, str]]:
    """Name and value of every figure that is not a latency."""
    failed = f", {report.failed} failed" if report.failed else ", none failed"
    yield "requests", f"{report.requests} in {report.seconds:.1f} s{failed}"
    yield "output", f"{report.output_tokens:,} tokens, {report.output_tokens_per_second:.1f} per second"
    share = report.cached_tokens / report.prompt_tokens if report.prompt_tokens else 0.0
    yield "prompts", f"{report.prompt_tokens:,} tokens, {report.cached_tokens:,} of them cached ({share:.0%})"
    if any(bound is not None for config in report.configs for bound in config.slo.model_dump().values()):
        yield "goodput", f"{report.goodput:.1%} of the requests kept their SLO"
    if report.kv_shipped_requests:
        shipped = f"{size(report.kv_bytes_shipped)} of KV for {report.kv_shipped_requests} requests"
        yield "handed over", f"{shipped} by {report.transport}"
    elif reason := report.no_handoff:
        yield "handed over", f"nothing: {reason}"
    if report.placement_calls_per_request:
        yield "placement", f"{report.placement_calls_per_request:.2f} script calls a request"


def milliseconds(seconds: float) -> str:
    if seconds >= 10:
        return f"{seconds:.1f} s"
    return f"{seconds * 1e3:.0f} ms" if seconds >= 0.1 else f"{seconds * 1e3:.1f} ms"


def size(count: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} GiB"
