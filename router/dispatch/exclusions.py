"""Why a request is not placed on some workers: what this router, and its own attempts, have met there."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from router.dispatch.attempt import Ended
from router.placement.types import Reason


def exclusions(
    silent: Iterable[str], attempts: Mapping[str, Reason], engines: Iterable[str]
) -> dict[str, Reason]:
    """Of a request: workers that this router hears nothing from, that its attempts met, and whose engines it failed in."""
    return {
        **dict.fromkeys(silent, Reason.SILENT),
        **attempts,
        **dict.fromkeys(engines, Reason.ENGINE),
    }


def ended_by(event: Ended) -> Reason:
    """Of a worker whose attempt has ended early: the stream broke, or the worker drains."""
    return Reason.LOST if event.end is None else Reason.DRAINED
