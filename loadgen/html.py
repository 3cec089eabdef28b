"""The report as one HTML page that loads nothing else, so it can be mailed and kept."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from importlib.resources import files

import numpy as np
import orjson

from loadgen.config import LoadConfig
from loadgen.record import STAGES, RequestRecord
from loadgen.report import Report, Summary
from loadgen.svg import Series, cdf_plot, line_plot, scatter_plot, stacked_bar
from loadgen.table import milliseconds, size, totals

TIME_BINS = 60


def page(report: Report) -> str:
    style = files("loadgen").joinpath("report.css").read_text()
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>Load report</title><style>{style}</style></head><body><main>"
        f"{''.join(_sections(report))}</main></body></html>\n"
    )


def _sections(report: Report) -> Iterator[str]:
    when = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(report.started_unix))
    yield f"<h1>Load report</h1><p class='lead'>{escape(_described(report.configs))} · {when}</p>"
    yield f"<div class='tiles'>{''.join(_tiles(report))}</div>"
    if report.answered:
        if report.stages:
            yield _stage_card(report)
        yield f"<div class='grid2'>{''.join(_plots(report))}</div>"
        yield _latency_card(report)
    if report.failed:
        yield _error_card(report)
    yield _small_print(report)


def _described(configs: Sequence[LoadConfig]) -> str:
    first = configs[0]
    protocols = " + ".join(dict.fromkeys(config.protocol for config in configs))
    if first.rate is None:
        arrival = f"closed loop, {sum(config.concurrency for config in configs)} users"
    else:
        arrival = f"open loop, {sum(config.rate or 0 for config in configs):g} requests/s, {first.arrival}"
    return (
        f"{protocols} · {arrival} · {first.workload} workload · at most {first.max_tokens} tokens an answer"
    )


def _tiles(report: Report) -> Iterator[str]:
    facts = dict(totals(report))
    yield _tile("Time to first token", milliseconds(report.ttft.p50), f"p99 {milliseconds(report.ttft.p99)}")
    yield _tile("Between tokens", milliseconds(report.itl.p50), f"p99 {milliseconds(report.itl.p99)}")
    yield _tile("Output", f"{report.output_tokens_per_second:,.0f} tok/s", f"{report.output_tokens:,} tokens")
    failed = f"{report.failed} failed" if report.failed else "none failed"
    yield _tile("Requests", f"{report.requests:,}", failed, bad=report.failed > 0)
    share = report.cached_tokens / report.prompt_tokens if report.prompt_tokens else 0.0
    yield _tile("Prompts cached", f"{share:.0%}", f"{report.cached_tokens:,} tokens")
    if report.kv_shipped_requests:
        more = f"{report.kv_shipped_requests} requests, {report.transport}"
        yield _tile("KV handed over", size(report.kv_bytes_shipped), more)
    elif report.no_handoff:
        yield _tile("KV handed over", "nothing", report.no_handoff)
    if "goodput" in facts:
        yield _tile("Goodput", f"{report.goodput:.1%}", "kept their SLO")


def _tile(name: str, value: str, more: str, *, bad: bool = False) -> str:
    css = "tile bad" if bad else "tile"
    return (
        f"<div class='{css}'><div class='name'>{escape(name)}</div><div class='value'>{escape(value)}</div>"
        f"<div class='more'>{escape(more)}</div></div>"
    )


def _plots(report: Report) -> Iterator[str]:
    groups = [(name, f"s{index}", report.of_protocol(name)) for index, name in enumerate(report.protocols)]
    groups = [group for group in groups if group[2].answered]
    legend = _legend([(name, css) for name, css, _ in groups]) if len(groups) > 1 else ""

    def cdf(title: str, note: str, values: Sequence[Sequence[float]]) -> str:
        series = [
            Series(name, css, [(value, 0.0) for value in own])
            for (name, css, _), own in zip(groups, values, strict=True)
            if own
        ]
        plot = cdf_plot(series, _tick) if series else "<p class='note'>nothing to show</p>"
        return _card(title, note, legend + plot)

    yield cdf("Time to first token", _CDF_NOTE, [[r.ttft for r in part.answered] for _, _, part in groups])
    gaps = [[gap for r in part.answered for gap in r.gaps] for _, _, part in groups]
    yield cdf("Between tokens (ITL)", _CDF_NOTE, gaps)
    tpots = [[tpot for r in part.answered if (tpot := r.tpot) is not None] for _, _, part in groups]
    yield cdf("Per token after the first (TPOT)", _CDF_NOTE, tpots)
    yield cdf("To the last token (E2E)", _CDF_NOTE, [[r.e2e for r in part.answered] for _, _, part in groups])
    clouds = [_cloud(name, css, part.answered) for name, css, part in groups]
    over_time = scatter_plot(clouds, _seconds, _tick)
    yield _card(
        "Time to first token over the run",
        "a dot is a request, at the time at which it was due",
        legend + over_time,
    )
    lines = [Series(name, css, _token_rate(part.answered)) for name, css, part in groups]
    rate = line_plot(lines, _seconds, lambda value: f"{value:,.0f}")
    yield _card("Output tokens per second over the run", "all streams together", legend + rate)


_CDF_NOTE = "share of all at or below; dots are p50, p90, p99"


def _cloud(name: str, css: str, records: Sequence[RequestRecord]) -> Series:
    points = [(record.intended, record.ttft) for record in records]
    notes = [
        f"{name} session {record.session} turn {record.turn}: {milliseconds(record.ttft)}, "
        f"{record.prompt_tokens} prompt tokens, {record.cached_tokens} cached"
        for record in records
    ]
    return Series(name, css, points, notes)


def _token_rate(records: Sequence[RequestRecord]) -> list[tuple[float, float]]:
    events = [(at, float(tokens)) for record in records for at, tokens in record.arrivals]
    return rate_over_time(events, TIME_BINS)


def rate_over_time(events: Sequence[tuple[float, float]], bins: int) -> list[tuple[float, float]]:
    """(middle of the bin, amount per second) over the time that (time, amount) events span."""
    if not events:
        return []
    times, amounts = np.array(events).T
    end = max(float(times.max()), 1e-9)
    totals, edges = np.histogram(times, bins, (0.0, end), weights=amounts)
    width = end / bins
    return [
        (float(edge) + width / 2, float(total) / width) for edge, total in zip(edges, totals, strict=False)
    ]


def _stage_card(report: Report) -> str:
    stages = [(f"g{index}", STAGES[stage], one) for index, (stage, one) in enumerate(report.stages.items())]
    bar = stacked_bar([(name, css, summary.mean) for css, name, summary in stages], milliseconds)
    rows = {f"{_key(css)}{name}": summary for css, name, summary in stages}
    return _card(
        "Where the server spent it",
        "the bar is the mean request, by the server's own clocks",
        bar + _summaries(("mean", "p50", "p99"), rows),
    )


def _latency_card(report: Report) -> str:
    rows = {
        "TTFT, time to first token": report.ttft,
        "ITL, between tokens": report.itl,
        "TPOT, per token after the first": report.tpot,
        "E2E, to the last token": report.e2e,
        "how late requests were sent": report.send_lag,
    }
    table = _summaries(("p50", "p90", "p99", "mean", "max"), rows)
    return _card("Latencies", "from the time at which a request was due", table)


def _summaries(columns: Sequence[str], rows: Mapping[str, Summary]) -> str:
    head = "".join(f"<th>{column}</th>" for column in columns)
    return _table(
        f"<tr><th></th>{head}</tr>",
        *(
            f"<tr><td>{name}</td>{''.join(f'<td>{milliseconds(getattr(one, column))}</td>' for column in columns)}</tr>"
            for name, one in rows.items()
        ),
    )


def _table(*rows: str) -> str:
    return f"<div class='scroll'><table>{''.join(rows)}</table></div>"


def _error_card(report: Report) -> str:
    messages = report.error_messages()
    rows = (
        f"<tr><td>{escape(kind)}</td><td>{count}</td><td>{escape(' · '.join(messages.get(kind, [])))}</td></tr>"
        for kind, count in report.errors.items()
    )
    return _card("Failures", "", _table(*rows))


def _small_print(report: Report) -> str:
    inside = _table(*(f"<tr><td>{name}</td><td>{escape(value)}</td></tr>" for name, value in totals(report)))
    if samples := "".join(map(_sample, report.samples())):
        inside += f"<details><summary>Sample answers</summary>{samples}</details>"
    config = orjson.dumps(report.to_json()["config"], option=orjson.OPT_INDENT_2).decode()
    inside += f"<details><summary>Configuration</summary><pre>{escape(config)}</pre></details>"
    return _card("In all", "", inside)


def _sample(record: RequestRecord) -> str:
    answer = f"<span class='answer'>{escape(record.sample_answer)}</span>"
    return f"<pre>{escape(record.sample_prompt)}\n{answer}</pre>"


def _card(title: str, note: str, inside: str) -> str:
    small = f"<p class='note'>{escape(note)}</p>" if note else ""
    return f"<section class='card'><h2>{escape(title)}</h2>{small}{inside}</section>"


def _legend(names: Sequence[tuple[str, str]]) -> str:
    keys = "".join(f"<span>{_key(f'dot {css}')}{escape(name)}</span>" for name, css in names)
    return f"<div class='legend'>{keys}</div>"


def _key(css: str) -> str:
    square = f"<svg viewBox='0 0 10 10'><rect class='{css}' width='10' height='10' rx='3'/></svg>"
    return f"<span class='key'>{square}</span>"


def _tick(seconds: float) -> str:
    return f"{seconds:g} s" if seconds >= 1 else f"{seconds * 1e3:.4g} ms"


def _seconds(value: float) -> str:
    return f"{value:g} s"
