"""How many requests one tenant, or one connection, may have at a time, and of which class."""

from __future__ import annotations

from collections import Counter

from cluster.auth.keys import Caller
from cluster.errors import ForbiddenError, OverloadedError
from router.completion import Completion
from router.placement.types import urgency_of

RETRY_SECONDS = 1.0
_CLASSES = ("batch", "normal", "high")  # the lowest first


class Places:
    """Requests in flight by holder. Holders without any are not remembered."""

    def __init__(self, what: str):
        self._what = what
        self._taken: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._taken)

    def take(self, holder: str, limit: int) -> None:
        """Raises OverloadedError when `limit` are taken; 0 = no limit."""
        if limit and self._taken[holder] >= limit:
            raise OverloadedError(
                f"this {self._what} has {limit} requests in flight",
                field=self._what,
                limit=str(limit),
                retry_after_seconds=RETRY_SECONDS,
            )
        self._taken[holder] += 1

    def give_back(self, holder: str) -> None:
        self._taken[holder] -= 1
        if self._taken[holder] <= 0:
            del self._taken[holder]


def check_priority(completion: Completion, caller: Caller) -> None:
    """Raise ForbiddenError if the request's class is above its key's: it would enter before every other tenant's."""
    asked = urgency_of(completion.priority)
    if _CLASSES.index(asked) > _CLASSES.index(caller.max_priority):
        raise ForbiddenError(
            f"priority: this API key allows at most {caller.max_priority}, not {asked}; "
            "max_priority of the key's entry raises it",
            field="priority",
            limit=caller.max_priority,
        )
