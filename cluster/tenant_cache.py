"""Values that are cached for each tenant by itself, bounded in sum."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator
from typing import Generic, TypeVar

V = TypeVar("V")


class TenantCache(Generic[V]):
    """A tenant finds what was cached for it alone, so the time of an answer reveals nothing about another tenant's
    requests. `drop_oldest_of_largest` says which value goes where there are too many. Not thread-safe."""

    def __init__(self) -> None:
        # The tenant, and in it the value, that was used last comes last; none is empty.
        self._tenants: OrderedDict[str, OrderedDict[bytes, V]] = OrderedDict()
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def __contains__(self, key: tuple[str, bytes]) -> bool:
        tenant, name = key
        return name in self._tenants.get(tenant, ())

    def __getitem__(self, key: tuple[str, bytes]) -> V:
        """The value, which counts as used. Raises KeyError."""
        tenant, name = key
        mine = self._tenants[tenant]
        value = mine[name]
        mine.move_to_end(name)
        self._tenants.move_to_end(tenant)
        return value

    def __setitem__(self, key: tuple[str, bytes], value: V) -> None:
        tenant, name = key
        mine = self._tenants.setdefault(tenant, OrderedDict())
        self._count += name not in mine
        mine[name] = value
        mine.move_to_end(name)
        self._tenants.move_to_end(tenant)

    def values(self) -> Iterator[V]:
        return (value for mine in self._tenants.values() for value in mine.values())

    def drop_oldest_of_largest(self, size: Callable[[Collection[V]], int]) -> V:
        """Drop the value used longest ago of the tenant whose values have the largest `size`; of several, of the one that
        has used none for longest. Looks at all tenants. Raises ValueError if there is no value."""
        tenant, mine = max(self._tenants.items(), key=lambda one: size(one[1].values()))
        _, value = mine.popitem(last=False)
        self._count -= 1
        if not mine:
            del self._tenants[tenant]
        return value

    def check_integrity(self) -> None:
        assert all(self._tenants.values()) and self._count == sum(map(len, self._tenants.values()))
