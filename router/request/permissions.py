"""Permissions of a key: models, parts of an answer that only admins' keys see (workers, queueing times, placement), and a
class of priority."""

from __future__ import annotations

from collections.abc import Sequence
from typing import get_args

from cluster.errors import ForbiddenError, UnknownModelError
from cluster.protocol.priority import PriorityClass, class_of
from cluster.security.keys import Caller
from router.request.completion import Completion
from router.request.limits import MAX_SHOWN
from wire import inference_pb2

_CLASSES = get_args(PriorityClass)  # the lowest first
ADMIN_TIMINGS = frozenset(
    {
        "router_queue_seconds",
        "prefill_queue_seconds",
        "decode_queue_seconds",
        "prefill_worker",
        "decode_worker",
    }
)


def check_allowed(completion: Completion, caller: Caller, model: str) -> None:
    """Raises ForbiddenError for what the caller's key does not allow: `explain`, which names all workers and their loads,
    and a class above its own for `model`, the name of a served one: it would overtake requests of other tenants."""
    if completion.explain and not caller.admin:
        raise ForbiddenError("explain: requires an API key with admin: true", field="explain")
    asked, highest = class_of(completion.priority), caller.highest_class(model)
    if _CLASSES.index(asked) > _CLASSES.index(highest):
        raise ForbiddenError(
            f"priority: this API key allows at most {highest} for {model}, not {asked}; max_priority of the key's entry "
            "raises it, or of its model_limits for this model",
            field="priority",
            limit=highest,
        )


def check_model_allowed(caller: Caller, asked: str, named: str) -> None:
    """`named`: the model or adapter that `asked` is a name of; "" = none that is served.

    Raises UnknownModelError, the same for a model that is not served: a key shows only the models that it allows.
    """
    if not named or not caller.may_name(named):
        shown = asked[:MAX_SHOWN] or "the default"
        raise UnknownModelError(
            f"model: {shown!r} does not exist or this API key has no access to it", field="model"
        )


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
