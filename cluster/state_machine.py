"""A state with its table of transitions."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Generic, TypeVar

from cluster.errors import IllegalTransition

S = TypeVar("S", bound=Enum)


class StateMachine(Generic[S]):
    """Holds a state; `to` moves it along `table`, or raises IllegalTransition and changes nothing."""

    def __init__(self, initial: S, table: Mapping[S, frozenset[S]], name: str = ""):
        self._state = initial
        self._table = table
        self._name = name

    @property
    def state(self) -> S:
        return self._state

    def may(self, new: S) -> bool:
        return new in self._table.get(self._state, frozenset())

    def to(self, new: S) -> None:
        if not self.may(new):
            raise IllegalTransition(f"{self._name}: {self._state.name} may not become {new.name}")
        self._state = new
