"""`python -m baton up` whose routers and workers are forked from a process that has imported their modules.

Their arguments, environments, sessions and logs are those of `baton up`. A router saves a second of imports, a worker
four. Ray's processes and ranks are started as always.
"""

from __future__ import annotations

import os
import runpy
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import cast

from baton.local import children
from tests.harness.preloaded import Preloaded, forked_from_here

FORKED = ("router", "prefill", "decode")


def main() -> None:
    forks, start = forked_from_here(), children.start

    def fork(
        name: str, command: Sequence[str], logs: Path, env: dict[str, str] | None = None
    ) -> children.Child:
        arguments = list(command[3:])
        if list(command) != children.baton_command(*arguments) or arguments[0] not in FORKED:
            return start(name, command, logs, env)
        return _forked(forks, name, arguments, logs, env)

    children.start = fork
    runpy.run_module("baton", run_name="__main__", alter_sys=True)


def _forked(
    forks: Preloaded, name: str, arguments: list[str], logs: Path, env: dict[str, str] | None
) -> children.Child:
    log = logs / f"{name}.log"
    with log.open("ab") as output:
        environment = {**os.environ, **(env or {})}
        process = forks.fork(
            ["baton", *arguments], environment, output.fileno(), output.fileno(), session=True
        )
    process.stdin.close()
    return children.Child(name, cast("subprocess.Popen[bytes]", process), log)


if __name__ == "__main__":
    main()
