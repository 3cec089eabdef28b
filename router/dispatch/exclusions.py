"""The workers that a request excludes, with the reasons."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from router.dispatch.attempt import Ended
from router.placement.types import Reason


def exclusions(
    silent: Iterable[str], attempts: Mapping[str, Reason], engines: Iterable[str]
) -> dict[str, Reason]:
    """`silent`: workers from which this router receives nothing. `attempts`: reasons of the request's own attempts, by
    worker. `engines`: in which the request failed."""
    return {
        **dict.fromkeys(silent, Reason.SILENT),
        **attempts,
        **dict.fromkeys(engines, Reason.ENGINE),
    }


def ended_by(event: Ended) -> Reason:
    """Why a worker is excluded whose attempt has ended early: the stream broke, or the worker drains."""
    return Reason.LOST if event.end is None else Reason.DRAINED
