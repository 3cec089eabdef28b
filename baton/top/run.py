"""The loop of `baton top`: poll, draw, wait for q."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import termios
import time
import tty
from collections.abc import Iterator
from typing import NoReturn

from rich.console import Console, RenderableType
from rich.live import Live

from baton.router_http import RouterHttp
from baton.top.feed import Feed, FeedSnapshot, ask
from baton.top.frame import frame
from cluster.errors import ConfigError, UnavailableError

KEY_WAIT_SECONDS = 0.1
_QUIT = ("q", "Q")


def once(router: RouterHttp, console: Console) -> None:
    """Print one frame. Raises UnavailableError or UnauthenticatedError."""
    console.print(frame(FeedSnapshot(router.address, ask(router)), width=console.width))


def run(router: RouterHttp, console: Console, interval_seconds: float) -> None:
    """Run until q or Ctrl-C. Waits for a router that does not answer; an insufficient API key is an error."""
    # On a dumb terminal each frame would follow the last one.
    if not console.is_terminal or console.is_dumb_terminal:
        raise ConfigError("baton top draws on a terminal; --once prints one frame", field="once")
    with contextlib.suppress(KeyboardInterrupt), _orderly_end():
        with contextlib.suppress(UnavailableError):
            ask(router)
        feed = Feed(router, interval_seconds)
        feed.start()
        try:
            with Keyboard() as keyboard, Live(console=console, screen=True, auto_refresh=False) as live:
                while keyboard.pressed(KEY_WAIT_SECONDS) not in _QUIT:
                    live.update(_now(feed, console), refresh=True)
        finally:
            feed.stop()


@contextlib.contextmanager
def _orderly_end() -> Iterator[None]:
    """Within the context SIGTERM raises, as Ctrl-C does: the terminal would keep the other screen, and echo no keys."""
    before = signal.getsignal(signal.SIGTERM)
    if before is not signal.SIG_IGN:
        signal.signal(signal.SIGTERM, _end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _end(number: int, _: object) -> NoReturn:
    sys.exit(128 + number)


def _now(feed: Feed, console: Console) -> RenderableType:
    look = feed.look
    lost = time.monotonic() - look.lost_since if look.problem else 0.0
    return frame(look, width=console.width, height=console.height, lost_seconds=lost)


class Keyboard:
    """Within the context keys are not echoed and arrive one by one; without a terminal there are none."""

    def __init__(self) -> None:
        self._fd = sys.stdin.fileno() if sys.stdin is not None and sys.stdin.isatty() else None

    def __enter__(self) -> Keyboard:
        if self._fd is not None:
            self._before = termios.tcgetattr(self._fd)
            tty.setcbreak(self._fd)
        return self

    def __exit__(self, *_: object) -> None:
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
