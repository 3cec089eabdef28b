"""One choice of one request, as the client has seen it so far."""

from __future__ import annotations

import asyncio

from router.request.completion import Completion, Delta, FinishReason
from router.text.stop import StopMatcher
from router.text.tokenizer import ModelText
from wire import common_pb2

RESUMED_AT_ONCE = 256  # tokens between two turns of the event loop: 1 to 5 ms
_FINISH: dict[int, FinishReason] = {
    common_pb2.FINISH_REASON_STOP: "stop",
    common_pb2.FINISH_REASON_LENGTH: "length",
}


class GapError(Exception):
    """A token came before the one that precedes it: the attempt can't be trusted."""


class ChoiceStream:
    """Forwards exactly the next position: lower ones are dropped, a gap fails the attempt."""

    def __init__(self, index: int, completion: Completion, text: ModelText, shown_as: int | None = None):
        """`shown_as`: the choice's number in an answer to several prompts."""
        self.index = index
        self._shown_as = index if shown_as is None else shown_as
        self.output = list(completion.resume_tokens)
        self.new_tokens = 0
        self._last_came: float | None = None
        self.finish: FinishReason | None = None
        self._prompt_tokens = len(completion.prompt_tokens)
        self._detokenizer = text.detokenizer(completion.prompt_tokens)
        self._stop = StopMatcher(completion.stop_strings, completion.include_stop_text)

    async def read_resumed(self) -> None:
        """Read the tokens that the client already holds, because stop strings may begin in their text. Call it before the
        first token. They may be as long as a whole answer, so it yields to the event loop in between."""
        for count, token in enumerate(self.output, 1):
            self._stop.add(self._detokenizer.add(token))
            if count % RESUMED_AT_ONCE == 0:
                await asyncio.sleep(0)

    @property
    def next_position(self) -> int:
        return self._prompt_tokens + len(self.output)

    def gap_seconds(self, now: float) -> float | None:
        """Since the token before the one that came `now`; None for the first."""
        before, self._last_came = self._last_came, now
        return None if before is None else now - before

    def take(self, token: common_pb2.Token) -> Delta | None:
        """None: already forwarded, or nothing is wanted any more. Raises GapError."""
        if self.finish is not None or token.position < self.next_position:
            return None
        if token.position > self.next_position:
            raise GapError(f"position {token.position} came, {self.next_position} was next")
        self.output.append(token.token_id)
        self.new_tokens += 1
        ended = _FINISH.get(token.finish)
        # The token that stops an answer is not part of its text (it may be an ordinary word: a stop id).
        text = "" if ended == "stop" else self._stop.add(self._detokenizer.add(token.token_id))
        if self._stop.stopped:
            self.finish = "stop"
        elif ended is not None:
            text += self._stop.add(self._detokenizer.flush()) + self._stop.flush()
            self.finish = "stop" if self._stop.stopped else ended
        return Delta(self._shown_as, text, (token,), self.finish)
