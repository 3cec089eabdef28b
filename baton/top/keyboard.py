"""Single key presses of a terminal, without Enter."""

from __future__ import annotations

import os
import select
import sys
import termios
import time
import tty
from types import TracebackType


class Keyboard:
    """Within the context keys are not echoed and arrive one by one; without a terminal there are none."""

    def __init__(self) -> None:
        self._fd = sys.stdin.fileno() if sys.stdin is not None and sys.stdin.isatty() else None

    def __enter__(self) -> Keyboard:
        if self._fd is not None:
            self._before = termios.tcgetattr(self._fd)
            tty.setcbreak(self._fd)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._fd is not None:
            termios.tcsetattr(self._fd, termios.TCSADRAIN, self._before)

    def pressed(self, wait_seconds: float) -> str:
        """Return a key pressed within the time, or ""."""
        if self._fd is None:
            time.sleep(wait_seconds)
            return ""
        readable, _, _ = select.select([self._fd], [], [], wait_seconds)
        # Not through sys.stdin: select does not see its buffer.
        return os.read(self._fd, 1).decode(errors="ignore") if readable else ""
