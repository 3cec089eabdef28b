"""A memory limit that the kernel enforces: a cgroup of its own, if this machine lets us make one."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

_CGROUPS = Path("/sys/fs/cgroup/memory")  # version 1
_ENTER = 'echo $$ > "$0/cgroup.procs" && exec "$@"'


@contextlib.contextmanager
def limited(limit: int) -> Iterator[list[str] | None]:
    """Yields what to put before a command so that it runs within `limit` bytes; None if nothing here enforces that."""
    own = _own_group()
    if own is not None and os.access(own, os.W_OK):
        group = own / f"baton-test-{os.getpid()}"
        try:
            group.mkdir()
        except OSError:
            yield _by_systemd(limit)
            return
        try:
            (group / "memory.limit_in_bytes").write_text(str(limit))
            yield ["sh", "-c", _ENTER, str(group)]
        finally:
            group.rmdir()
    else:
        yield _by_systemd(limit)


def _own_group() -> Path | None:
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "memory" and (group := _CGROUPS / path.lstrip("/")).is_dir():
            return group
    return None


def _by_systemd(limit: int) -> list[str] | None:
    """For cgroups of version 2, where a process can't be in a group that has groups."""
    if shutil.which("systemd-run") is None:
        return None
    command = ["systemd-run", *([] if os.geteuid() == 0 else ["--user"]), "--scope", "--quiet"]
    command += ["-p", f"MemoryMax={limit}", "-p", "MemorySwapMax=0"]
    done = subprocess.run([*command, "true"], capture_output=True, timeout=20, check=False)
    return command if done.returncode == 0 else None
