"""How far the worker of one attempt may send each choice of the answer."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from cluster.protocol.link import WINDOW_TOKENS, window_of
from router.dispatch.choice import ChoiceStream
from router.link.token import Token


class AnswerCredit:
    """A window beyond what the client has read of each choice; all choices share one window's tokens."""

    def __init__(self, choices: Sequence[ChoiceStream]):
        count = max(1, len(choices))
        self._choices = choices
        self._window = window_of(count)  # of each choice
        # By choice: a token at this position or beyond breaks the attempt. A worker of link version 1 gives each choice a
        # whole window, where no credit has come yet.
        self.bounds = {choice.index: choice.next_position + WINDOW_TOKENS for choice in choices}
        self._beyond = WINDOW_TOKENS - self._window  # from the limit that the worker gets to the bound
        # Tokens after which a choice may be a quarter further, at the latest before the window of one is used up
        self._grant_after = min(count * self._window // 4, self._window - self._window // 4)
        self._ungranted = 0  # tokens that have come since `grant` looked at the choices
        # By choice: the position behind tokens that came and were not wanted
        self._unwanted: dict[int, int] = {}

    def positions(self) -> list[int]:
        """The next position of each choice."""
        return [self._next(choice) for choice in self._choices]

    def limits(self) -> list[int]:
        """The limit of each choice, as it was sent to the worker."""
        return [bound - self._beyond for bound in self.bounds.values()]

    def received(self) -> bool:
        """Note a token; returns whether `grant` is due once the client has every token so far."""
        self._ungranted += 1
        return self._ungranted == self._grant_after

    def was_not_wanted(self, token: Token) -> None:
        """Note a token of a choice that has ended, which counts as taken."""
        self._unwanted[token.choice] = max(self._unwanted.get(token.choice, 0), token.position + 1)

    def grant(self, send: Callable[[int, int], None]) -> None:
        """The client has every token so far: `send` (choice, limit) for each choice whose limit, a window beyond, is at
        least a quarter of one further."""
        self._ungranted = 0
        for choice in self._choices:
            bound = self._next(choice) + WINDOW_TOKENS
            if bound - self.bounds[choice.index] >= self._window // 4:
                self.bounds[choice.index] = bound
                send(choice.index, bound - self._beyond)

    def repeat(self, send: Callable[[int, int], None]) -> None:
        """`send` (choice, limit) for each choice, as it is now."""
        for choice, bound in self.bounds.items():
            send(choice, bound - self._beyond)

    def _next(self, choice: ChoiceStream) -> int:
        """The position to take next. A choice that a stop string ended goes on at the worker, where stop strings are not
        known: without credit for it, its full window would pause the whole request."""
        if choice.finish is None:
            return choice.next_position
        return max(choice.next_position, self._unwanted.get(choice.index, 0))
