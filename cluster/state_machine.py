"""A state with its table of transitions."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from enum import Enum
from typing import Generic, TypeVar

from cluster.errors import IllegalTransition

S = TypeVar("S", bound=Enum)


class StateMachine(Generic[S]):
    """Holds a state; `to` moves it along `table`, or raises IllegalTransition and changes nothing.

    `on_change(old, new)` is called after each transition.
    """

    def __init__(
        self,
        initial: S,
        table: Mapping[S, frozenset[S]],
        name: str = "",
        on_change: Callable[[S, S], None] | None = None,
    ):
        self._state = initial
        self._table = table
        self._name = name
        self._on_change = on_change

    @property
    def state(self) -> S:
        return self._state

    def may(self, new: S) -> bool:
        return new in self._table.get(self._state, frozenset())

    def to(self, new: S) -> None:
        if not self.may(new):
            raise IllegalTransition(f"{self._name}: {self._state.name} may not become {new.name}")
        old, self._state = self._state, new
        if self._on_change is not None:
            self._on_change(old, new)
