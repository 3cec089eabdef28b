"""Holds a decode worker's part of an answer while the prompt's log probabilities still come from the prefill worker.

The two links have no common order, and the client gets the prompt first. The decode worker has no credit beyond its first
window meanwhile, so what is held is bounded by that.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable

from cluster.errors import BatonError, InternalError
from router.dispatch.attempt_events import Ended
from router.link.token import Token

log = logging.getLogger(__name__)
TOKENS_PER_TURN = 64  # passed on in one turn of the event loop: about 1 ms


class HeldAnswer:
    """Tokens until `prompt_complete`; then the worker's end, if it is done. Another end waits for `prompt_ended` too:
    where the first token is the answer's last one, the prefill worker sends that behind the prompt and ends
    the hand-off."""

    def __init__(
        self,
        take: Callable[[Token], None],
        ended: Callable[[Ended], None],
        broken: Callable[[BatonError], None],
    ):
        self._take, self._ended, self._broken = take, ended, broken
        self._tokens: deque[Token] = deque()
        self._next: dict[int, int] = {}  # by choice: the position behind those held
        self._end: Ended | None = None
        self._complete = False  # the prompt
        self._prompt_ended = False

    def next_position(self, choice: int) -> int:
        """The position behind the tokens of the choice that are held; 0 = none is."""
        return self._next.get(choice, 0)

    def holds(self, token: Token) -> bool:
        """Keep the token if the prompt is not complete. Returns whether it is kept, or was before: a link that broke
        repeats some."""
        if self._complete and not self._tokens:
            return False
        if token.position >= self._next.get(token.choice, 0):
            self._next[token.choice] = token.position + 1
            self._tokens.append(token)
        return True

    def holds_end(self, end: Ended) -> bool:
        """Keep the end if it must wait for what precedes it. Returns whether it does."""
        self._end = end
        if self._end_is_due:
            self._end = None
        return self._end is not None

    def prompt_complete(self) -> None:
        """The client has the whole prompt, or is about to."""
        self._complete = True
        self._pass_on()

    def prompt_ended(self) -> None:
        """The prefill worker has ended, or is lost; that is reported already."""
        self._prompt_ended = True
        self._pass_end()

    @property
    def _end_is_due(self) -> bool:
        end = self._end
        if end is None or not self._complete or self._tokens:
            return False
        return end.is_done or self._prompt_ended

    def _pass_on(self) -> None:
        try:
            for _ in range(min(len(self._tokens), TOKENS_PER_TURN)):
                self._take(self._tokens.popleft())
        except Exception as error:  # in a callback of its own nothing else would end the attempt
            log.error("an attempt failed at a token of its answer", exc_info=error)
            self._tokens.clear()
            self._broken(InternalError(f"{type(error).__name__}: {error}"))
            return
        if self._tokens:
            asyncio.get_running_loop().call_soon(self._pass_on)
        else:
            self._pass_end()

    def _pass_end(self) -> None:
        if self._end is not None and self._end_is_due:
            end, self._end = self._end, None
            self._ended(end)
