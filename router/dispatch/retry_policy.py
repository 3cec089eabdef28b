"""How long a request goes on trying, and what ends it."""

from __future__ import annotations

import time
from collections.abc import Callable

from cluster import errors
from cluster.protocol.times import RETRY_PAUSE_SECONDS

FIRST_PAUSE_SECONDS = 0.02


class Retry(Exception):
    """This attempt is over, another one may follow."""

    def __init__(self, reason: errors.BatonError, *, pause_seconds: float = 0.0):
        super().__init__(str(reason))
        self.reason = reason
        self.pause_seconds = pause_seconds


class RetryPolicy:
    """Two limits: `max_attempts` costly ones in a row that brought no token, and the admission deadline.

    The deadline restarts with each token. A worker that is absent or full costs only time. A worker that responded and was
    then lost is `costly`: a request that kills workers must not kill one after another.
    """

    def __init__(
        self, max_attempts: int, admission_seconds: float, clock: Callable[[], float] = time.monotonic
    ):
        self._max_attempts = max_attempts
        self._admission_seconds = admission_seconds
        self._clock = clock
        self._pause = 0.0
        self._fruitless = 0
        self.deadline = clock() + admission_seconds

    def pause_seconds(
        self, reason: errors.BatonError, wanted: float, *, progress: bool, costly: bool
    ) -> float:
        """Seconds before the next attempt, at least `wanted`. Raises the error that ends the request."""
        if progress:
            self._pause, self._fruitless = 0.0, 0
            self.deadline = self._clock() + self._admission_seconds
        self._fruitless += costly and not progress
        pause = max(wanted, self._pause)
        self._pause = min(max(2 * self._pause, FIRST_PAUSE_SECONDS), RETRY_PAUSE_SECONDS)
        if self._fruitless >= self._max_attempts:
            raise errors.AttemptsExhaustedError(
                f"gave up after {self._fruitless} attempts: {reason.public_text}"
            ) from None
        if self._clock() + pause > self.deadline:
            if isinstance(reason, OVERLOAD):
                raise _overloaded(
                    f"no worker accepted the request in time: {reason.public_text}", reason
                ) from None
            raise _unavailable(
                f"no worker accepted the request in time: {reason.public_text}", reason
            ) from None
        return pause


# Errors of workers that are overloaded
OVERLOAD = (errors.OverloadedError, errors.DeadlineError, errors.BlocksExhaustedError)


def _overloaded(message: str, reason: errors.BatonError) -> errors.OverloadedError:
    return errors.OverloadedError(message, retry_after_seconds=reason.retry_after_seconds or 1.0)


def _unavailable(message: str, reason: errors.BatonError) -> errors.UnavailableError:
    return errors.UnavailableError(message, retry_after_seconds=reason.retry_after_seconds or 1.0)
