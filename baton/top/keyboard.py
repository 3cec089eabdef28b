"""Single keys from a terminal, without waiting for Enter."""

from __future__ import annotations

import os
import select
import sys
import termios
import time
import tty
from types import TracebackType


class Keyboard:
    """While inside, keys are not echoed and come one by one. Where stdin is no terminal, none ever comes."""

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
        """The key pressed within the time, or ""."""
        if self._fd is None:
            time.sleep(wait_seconds)
            return ""
        readable, _, _ = select.select([self._fd], [], [], wait_seconds)
        # Not through sys.stdin: what its buffer holds, select does not see.
        return os.read(self._fd, 1).decode(errors="ignore") if readable else ""
