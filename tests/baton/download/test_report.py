"""What `baton fetch` shows while it downloads."""

from __future__ import annotations

import io
from types import SimpleNamespace

from rich.console import Console
from rich.progress import Progress

from baton.download.report import LINE_SECONDS, BarReport, DownloadReport, LineReport, report_on

MIB, GIB = 1 << 20, 1 << 30


def _download(report: DownloadReport) -> None:
    """One file is here, one is complete, one continues an earlier attempt, one is restarted."""
    report.expect(4, 4 * GIB)
    report.finish("config.json", GIB)
    report.begin("a.safetensors", GIB, 0)
    report.begin("[red].safetensors", GIB, GIB // 4)
    report.begin("b.safetensors", GIB, GIB // 2)
    report.begin("b.safetensors", GIB, 0)
    report.advance("a.safetensors", GIB)
    report.finish("a.safetensors", GIB)
    report.advance("[red].safetensors", GIB // 4)


def test_lines_come_at_intervals_with_bytes_speed_and_files() -> None:
    clock = SimpleNamespace(now=0.0)
    lines: list[str] = []
    report = LineReport(lines.append, lambda: clock.now)
    _download(report)
    assert lines == []
    clock.now = LINE_SECONDS
    report.advance("b.safetensors", GIB // 10)
    report.advance("b.safetensors", MIB)
    assert lines == [
        "2 of 4 files, 2.6 of 4.0 GiB, 138.2 MiB/s; [red].safetensors 50 %, b.safetensors 9 %",
    ]
    clock.now += 2 * LINE_SECONDS
    report.advance("b.safetensors", 19 * MIB)
    assert lines[1].startswith("2 of 4 files, 2.6 of 4.0 GiB, 1.0 MiB/s; ")


def test_bars_show_all_files_and_those_under_way() -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=100)
    with Progress(console=console, auto_refresh=False) as bars:
        _download(BarReport(bars))
        shown = {task.description: (task.completed, task.total) for task in bars.tasks}
    assert shown == {
        "4 files": (2.5 * GIB, 4 * GIB),
        "[red].safetensors": (GIB / 2, GIB),
        "b.safetensors": (0, GIB),
    }


def test_a_terminal_gets_bars_and_everything_else_lines() -> None:
    kinds = []
    for options in ({"force_terminal": True, "force_interactive": True}, {"force_terminal": False}):
        out = io.StringIO()
        with report_on(Console(file=out, width=100, highlight=False, markup=False, **options)) as report:  # type: ignore[arg-type]
            report.expect(1, GIB)
            report.begin("[red].safetensors", GIB, GIB // 4)
            kinds.append(type(report))
        assert ("[red].safetensors" in out.getvalue()) == (kinds[-1] is BarReport)
    assert kinds == [BarReport, LineReport]
