"""Why no KV was handed over: one line for `baton status`, `baton top` and `/ui`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from cluster.membership.types import WorkerInfo
from router.placement.types import Mode

_LOCALLY = "decode workers compute prompts themselves"
_CHOSEN = ("prefill_worker", "decode_worker")


def why_no_handoff(mode: Mode, decided: Mapping[tuple[str, ...], int], workers: Iterable[WorkerInfo]) -> str:
    """Empty if there is nothing to explain: a prefill worker was chosen, or no request came and both roles are ready.

    `decided`: placements of this router by (the worker that prefills, where that was decided).
    """
    by = {
        role: sum(count for (prefills, *_), count in decided.items() if prefills == role) for role in _CHOSEN
    }
    if by["prefill_worker"]:
        return ""
    there = {worker.role for worker in workers if worker.lease == "live" and worker.state == "ready"}
    if mode == "always":
        return f"local_prefill is always: {_LOCALLY}"
    if there == {"decode"}:
        return "no prefill worker is ready" + ("" if mode == "never" else f": {_LOCALLY}")
    if there == {"prefill"}:
        return "no decode worker is ready"
    if not there or not by["decode_worker"]:
        return ""
    if mode == "auto":
        return (
            f"local_prefill is auto, and so far {_LOCALLY} sooner than a hand-off takes: prompts are short, or mostly "
            f"cached there (fallback uses prefill workers for all)"
        )
    return f"when requests came no prefill worker was ready: {_LOCALLY}"
