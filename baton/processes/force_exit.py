"""A deadline for the end of a process."""

from __future__ import annotations

import faulthandler

EXIT_SECONDS = 30.0


def end_surely(seconds: float = EXIT_SECONDS) -> None:
    """End this process within EXIT_SECONDS.

    A start that failed half-way leaves threads of libraries (torch's process groups, Ray, NIXL) for which Python may wait
    without end, and so would the parent process. After the deadline the stacks of all threads are printed and the exit
    code is 1, which does not need the interpreter's lock.
    """
    faulthandler.dump_traceback_later(seconds, exit=True)
