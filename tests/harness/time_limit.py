"""The limit of a test's time, pytest-timeout's, which also ends tests that run an event loop.

pytest-timeout raises once, from a signal's handler. A loop whose callback is interrupted so only logs the exception, and
the test goes on without a limit. A failed test has none from then on either: pytest-timeout cancels it for debuggers.
Here the handler also stops the loop, and is called again; a process that still runs after that is ended.
"""

from __future__ import annotations

import asyncio
import gc
import signal
import sys
import threading
from collections.abc import Generator
from typing import Any

import pytest
from pytest_timeout import PYTEST_FAILURE_MESSAGE, Settings, timeout_sigalrm, timeout_timer

AGAIN_SECONDS = (
    5.0  # from one call of the handler to the next: ending tasks have time to release what they hold
)
EXIT_SECONDS = (
    120.0  # from the first call to the end of the process: fixtures have time to stop their clusters
)


class TimeLimit:
    """The limit of one test, over its fixtures too."""

    def __init__(self, item: pytest.Item, settings: Settings) -> None:
        self._item = item
        self._settings = settings
        self._exit: threading.Timer | None = None
        self.in_phase = False

    @property
    def reached(self) -> bool:
        return self._exit is not None

    @property
    def message(self) -> str:
        return str(PYTEST_FAILURE_MESSAGE % self._settings.timeout)

    def start(self) -> None:
        signal.signal(signal.SIGALRM, self._on_alarm)
        signal.setitimer(signal.ITIMER_REAL, self._settings.timeout, AGAIN_SECONDS)

    def cancel(self) -> None:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        if self._exit is not None:
            self._exit.cancel()
            self._exit.join()
            gc.enable()

    def _on_alarm(self, *_: object) -> None:
        __tracebackhide__ = True
        if not self.in_phase:
            return  # the next call is soon
        loop = asyncio._get_running_loop()
        if loop is not None:
            loop.stop()  # also where a callback is interrupted, whose exception goes no further than the loop
            for task in asyncio.all_tasks(loop):
                task.print_stack(file=sys.stderr)
        if self._exit is None:
            # Started here, not with the test: a process that was suspended for minutes is not ended when it goes on.
            self._exit = threading.Timer(EXIT_SECONDS, timeout_timer, (self._item, self._settings))
            self._exit.daemon = True
            self._exit.start()
            # Until the test is reported: CPython 3.11 fails where a lost task's finalizer formats its traceback while
            # pytest parses the source for a report.
            gc.disable()
        elif loop is None:
            return  # fixtures without a loop are torn down
        timeout_sigalrm(self._item, self._settings)


LIMIT = pytest.StashKey[TimeLimit]()


@pytest.hookimpl(optionalhook=True)
def pytest_timeout_set_timer(item: pytest.Item, settings: Settings) -> bool | None:
    if settings.method != "signal" or threading.current_thread() is not threading.main_thread():
        return None  # pytest-timeout's own thread ends the process
    item.stash[LIMIT] = TimeLimit(item, settings)
    item.stash[LIMIT].start()
    return True


@pytest.hookimpl(optionalhook=True)
def pytest_timeout_cancel_timer(item: pytest.Item) -> bool | None:
    """Called for a failed test as well, before its fixtures are torn down: they keep the limit, unless in a debugger."""
    if LIMIT not in item.stash:
        return None
    if item.config.getoption("usepdb"):
        item.stash[LIMIT].cancel()
    return True


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, Any, Any]:
    try:
        return (yield)
    finally:
        if LIMIT in item.stash:
            item.stash[LIMIT].cancel()


def in_phase(item: pytest.Item) -> Generator[None, Any, Any]:
    """Setup, call or teardown: no exception is raised between them, where pytest would end."""
    if LIMIT not in item.stash:
        return (yield)
    limit = item.stash[LIMIT]
    limit.in_phase = True
    try:
        return (yield)
    except RuntimeError as error:  # "Event loop stopped before Future completed"
        if limit.reached:
            pytest.fail(f"{limit.message}: {error}")
        raise
    finally:
        limit.in_phase = False


pytest_runtest_setup = pytest.hookimpl(wrapper=True, tryfirst=True)(in_phase)
pytest_runtest_call = pytest.hookimpl(wrapper=True, tryfirst=True)(in_phase)
pytest_runtest_teardown = pytest.hookimpl(wrapper=True, tryfirst=True)(in_phase)
