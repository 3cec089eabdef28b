"""How many requests one tenant, or one connection, may have at a time."""

from __future__ import annotations

from collections import Counter

from cluster.errors import OverloadedError

RETRY_SECONDS = 1.0


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
