"""Entry point of the program `baton`: Ctrl-C while the commands are imported, which takes a second, ends it without a
traceback."""

from __future__ import annotations

import os


def main() -> None:
    try:
        from baton.cli.main import main as run
    except KeyboardInterrupt:
        os._exit(130)  # not sys.exit: a module that is half imported may have threads
    run()
