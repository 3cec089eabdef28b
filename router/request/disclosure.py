"""Parts of an answer that only admins' keys see: workers, queueing times, placement."""

from __future__ import annotations

from collections.abc import Sequence

from cluster.errors import ForbiddenError
from cluster.security.keys import Caller
from router.request.completion import Completion
from wire import inference_pb2

ADMIN_TIMINGS = frozenset(
    {
        "router_queue_seconds",
        "prefill_queue_seconds",
        "decode_queue_seconds",
        "prefill_worker",
        "decode_worker",
    }
)


def check_explain(completion: Completion, caller: Caller) -> None:
    """Raise ForbiddenError for `explain` without an admin's key: it names all workers and their loads."""
    if completion.explain and not caller.admin:
        raise ForbiddenError("explain: requires an API key with admin: true", field="explain")


def timings_for(caller: Caller, timings: inference_pb2.Timings) -> inference_pb2.Timings:
    if caller.admin:
        return timings
    shown = inference_pb2.Timings()
    shown.CopyFrom(timings)
    for name in ADMIN_TIMINGS:
        shown.ClearField(name)  # type: ignore[arg-type]
    return shown


def workers_for(caller: Caller, worker_ids: Sequence[str]) -> Sequence[str]:
    return worker_ids if caller.admin else ()
