"""`python -m tests.system.own_processes COMMAND …` runs a command that sees no others, as in a container (root)."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

CLONE_NEWNS, CLONE_NEWPID = 0x00020000, 0x20000000
MS_REC, MS_PRIVATE = 0x4000, 0x40000


def main(command: list[str]) -> int:
    libc = ctypes.CDLL(None, use_errno=True)
    _check(libc.unshare(CLONE_NEWNS | CLONE_NEWPID))
    _check(libc.mount(None, b"/", None, MS_REC | MS_PRIVATE, None))
    child = os.fork()
    if not child:
        _check(libc.mount(b"proc", b"/proc", b"proc", 0, None))
        os.execvp(command[0], command)
    signal.signal(signal.SIGTERM, lambda number, _: os.kill(child, number))
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status)


def _check(result: int) -> None:
    if result:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
