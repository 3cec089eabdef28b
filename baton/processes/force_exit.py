"""A process that is done ends."""

from __future__ import annotations

import faulthandler

EXIT_SECONDS = 30.0


def end_surely(seconds: float = EXIT_SECONDS) -> None:
    """From now on this process has so long to end, however it came to that. A start that failed half-way leaves
    threads of libraries behind (torch's process groups, Ray, NIXL), which Python may wait for without end; whoever
    started this process waits for it too. After that time every thread's stack is printed, and the exit code is 1:
    nobody needs the interpreter's lock for that.
    """
    faulthandler.dump_traceback_later(seconds, exit=True)
