"""The prompt's tokens with their log probabilities, as the client has seen them so far."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from router.dispatch.choice import GapError
from router.link.token import Token


class PromptStream:
    """Forwards exactly the next position, over all attempts: lower ones are dropped, a gap fails the attempt. The token
    at position 0 has no log probability, and never comes."""

    def __init__(self, prompt: Sequence[int], forward: Callable[[Token], None]):
        self._prompt, self._forward = prompt, forward
        self.next_position = 1

    @property
    def limit(self) -> int:
        """Positions below it may come."""
        return len(self._prompt)

    def take(self, token: Token) -> None:
        """Raises GapError."""
        position = token.position
        if position < self.next_position:
            return
        if position > self.next_position or token.token_id != self._prompt[position]:
            raise GapError(
                f"token {token.token_id} of the prompt came at {position}, {self.next_position} was next"
            )
        self.next_position = position + 1
        self._forward(token)

    def check_complete(self) -> None:
        """Before a token of an answer. Raises GapError."""
        if self.next_position < self.limit:
            raise GapError(f"an answer began before position {self.next_position} of its prompt came")
