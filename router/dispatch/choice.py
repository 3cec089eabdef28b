"""One choice of one request, as the client has seen it so far."""

from __future__ import annotations

import asyncio

from router.link.token import Token
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
        self.next_position = len(completion.prompt_tokens) + len(self.output)
        self.new_tokens = 0
        self.last_came: float | None = None  # time of its last token
        self.finish: FinishReason | None = None
        self._detokenizer = text.detokenizer(completion.prompt_tokens)
        self._stop = StopMatcher(completion.stop_strings, completion.include_stop_text)

    async def read_resumed(self) -> None:
        """Read the tokens that the client already holds, because stop strings may begin in their text. Call it before the
        first token. They may be as long as a whole answer, so it yields to the event loop in between."""
        for count, token in enumerate(self.output, 1):
            self._stop.add(self._detokenizer.add(token))
            if count % RESUMED_AT_ONCE == 0:
                await asyncio.sleep(0)

    def take(self, token: Token) -> Delta | None:
        """None: already forwarded, or nothing is wanted any more. Raises GapError."""
        position = token.position
        if self.finish is not None or position < self.next_position:
            return None
        if position > self.next_position:
            raise GapError(f"position {position} came, {self.next_position} was next")
        token_id = token.token_id
        self.output.append(token_id)
        self.next_position = position + 1
        self.new_tokens += 1
        ended = _FINISH.get(token.finish)
        # The token that stops an answer is not part of its text (it may be an ordinary word: a stop id).
        text = "" if ended == "stop" else self._stop.add(self._detokenizer.add(token_id))
        if self._stop.stopped:
            self.finish = "stop"
        elif ended is not None:
            text += self._stop.add(self._detokenizer.flush()) + self._stop.flush()
            self.finish = "stop" if self._stop.stopped else ended
        return Delta(self._shown_as, text, (token,), self.finish)
