"""Progress of a download, as people see it: bars on a terminal, else a line now and then."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TaskID, TextColumn, TransferSpeedColumn

LINE_SECONDS = 10.0
GIB = 1 << 30


class DownloadReport:
    """Shows nothing. Called by several threads, for a file by one of them at a time. Sizes are bytes."""

    def expect(self, files: int, size: int) -> None:
        """Announce all files and their size, with those that are here already. Called again when the download begins."""

    def wait(self, directory: Path, have: int) -> None:
        """Another process downloads to the directory, where `have` bytes are. Called again and again until it ends."""

    def begin(self, path: str, size: int, have: int) -> None:
        """A file's download starts, with the first `have` bytes there already. Called again if it is restarted."""

    def advance(self, path: str, count: int) -> None: ...

    def finish(self, path: str, size: int) -> None:
        """The file is here and checked."""


@contextlib.contextmanager
def report_on(console: Console) -> Iterator[DownloadReport]:
    """Bars where the console is a terminal that can redraw them, else lines."""
    if not console.is_interactive:
        yield LineReport(lambda line: console.print(line, soft_wrap=True))
        return
    with Progress(
        TextColumn("{task.description}", markup=False),  # a file's name is no markup
        BarColumn(),
        DownloadColumn(binary_units=True),
        TransferSpeedColumn(),
        console=console,
        transient=True,
    ) as bars:
        yield BarReport(bars)


@dataclass
class _File:
    size: int
    have: int
    is_complete: bool = False


class LineReport(DownloadReport):
    """A line at most every LINE_SECONDS while bytes come:
    `3 of 12 files, 4.2 of 15.0 GiB, 112.0 MiB/s; model-00004.safetensors 41 %`."""

    def __init__(self, write: Callable[[str], None], clock: Callable[[], float] = time.monotonic):
        self._write, self._clock = write, clock
        self._lock = threading.Lock()
        self._expected_files = self._expected_bytes = 0
        self._files: dict[str, _File] = {}
        self._received = 0  # since the last line
        self._last_line = clock()
        self._has_waited = False

    def expect(self, files: int, size: int) -> None:
        self._expected_files, self._expected_bytes = files, size

    def wait(self, directory: Path, have: int) -> None:
        with self._lock:
            if not self._has_waited or self._is_due():
                self._has_waited, self._last_line = True, self._clock()
                self._write(
                    f"another process downloads to {directory} (it holds .lock there); waiting for it, "
                    f"{have / GIB:.1f} of {self._expected_bytes / GIB:.1f} GiB"
                )

    def begin(self, path: str, size: int, have: int) -> None:
        with self._lock:
            self._files[path] = _File(size, have)

    def advance(self, path: str, count: int) -> None:
        with self._lock:
            self._files[path].have += count
            self._received += count
            self._write_if_due()

    def finish(self, path: str, size: int) -> None:
        with self._lock:
            self._files[path] = _File(size, size, is_complete=True)
            self._write_if_due()

    def _write_if_due(self) -> None:
        if self._is_due():
            self._write(self._line(self._clock() - self._last_line))
            self._received, self._last_line = 0, self._clock()

    def _is_due(self) -> bool:
        return self._clock() - self._last_line >= LINE_SECONDS

    def _line(self, passed: float) -> str:
        complete = sum(one.is_complete for one in self._files.values())
        have = sum(one.have for one in self._files.values())
        parts = [
            f"{complete} of {self._expected_files} files",
            f"{have / GIB:.1f} of {self._expected_bytes / GIB:.1f} GiB",
            f"{self._received / passed / (1 << 20):.1f} MiB/s",
        ]
        active = [(path, one) for path, one in self._files.items() if not one.is_complete]
        shares = ", ".join(f"{path} {100 * one.have // max(1, one.size)} %" for path, one in active)
        return ", ".join(parts) + (f"; {shares}" if shares else "")


class BarReport(DownloadReport):
    """A bar for all files, and one for each that is under way."""

    def __init__(self, bars: Progress):
        self._bars = bars
        self._all = bars.add_task("", total=None)
        self._files: dict[str, TaskID] = {}

    def expect(self, files: int, size: int) -> None:
        self._bars.update(self._all, description=f"{files} file{'s' * (files != 1)}", total=size, completed=0)

    def wait(self, directory: Path, have: int) -> None:
        self._bars.update(self._all, description="another process downloads there", completed=have)

    def begin(self, path: str, size: int, have: int) -> None:
        before = self._remove(path)
        self._files[path] = self._bars.add_task(path, total=size, completed=have)
        self._bars.advance(self._all, have - before)

    def advance(self, path: str, count: int) -> None:
        self._bars.advance(self._files[path], count)
        self._bars.advance(self._all, count)

    def finish(self, path: str, size: int) -> None:
        self._bars.advance(self._all, size - self._remove(path))

    def _remove(self, path: str) -> int:
        """Remove a file's bar; return the bytes that it showed."""
        task = self._files.pop(path, None)
        if task is None:
            return 0
        shown = next(one.completed for one in self._bars.tasks if one.id == task)
        self._bars.remove_task(task)
        return int(shown)
