"""One choice of one request, as the client has seen it so far."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Collection

from cluster.errors import UnreadableAnswerError
from router.link.token import Token
from router.request.completion import Completion, Delta, FinishReason, text_delta
from router.text.marked_text import MarkedText
from router.text.stop import StopMatcher
from router.text.tokenizer import ModelText
from wire import common_pb2

log = logging.getLogger(__name__)
RESUMED_SECONDS = 0.001  # of reading in one turn of the event loop; then the current token ends it
_FINISH: dict[int, FinishReason] = {
    common_pb2.FINISH_REASON_STOP: "stop",
    common_pb2.FINISH_REASON_LENGTH: "length",
}


class GapError(Exception):
    """A token came before the one that precedes it, so the attempt has failed."""


class ChoiceStream:
    """Forwards exactly the next position: lower ones are dropped, a gap fails the attempt."""

    def __init__(self, index: int, completion: Completion, text: ModelText, shown_as: int | None = None):
        """`shown_as`: the choice's number in an answer to several prompts."""
        self.index = index
        self._shown_as = index if shown_as is None else shown_as
        self.output = list(completion.resume_tokens)
        self.next_position = len(completion.prompt_tokens) + len(self.output)
        self.new_tokens = 0
        self.last_received: float | None = None  # time of its last token
        self.finish: FinishReason | None = None
        self._detokenizer = text.detokenizer(completion.prompt_tokens)
        self._stop = StopMatcher(completion.stop_strings, completion.include_stop_text)
        self._keeps_stop = completion.include_stop_text
        self._min_tokens = completion.sampling.min_tokens  # in their text no stop string ends the answer
        self._stop_ids = _stop_ids(completion.sampling, text)
        source = completion.answer_format
        self._marked = None if source is None else MarkedText(source.parser(), source.marker_texts)
        self._plain = source is None and not completion.stop  # nothing is looked for in its text

    @property
    def reasoning_tokens(self) -> int:
        """The number of its tokens whose text was parsed as reasoning."""
        return 0 if self._marked is None else self._marked.reasoning_tokens

    @property
    def stopped(self) -> bool:
        """Whether a stop string has ended it. Workers do not look for these: they go on with it."""
        return self._stop.stopped

    async def read_resumed(self) -> None:
        """Read the tokens that the client already holds, because stop strings may begin in their text, and the parser must
        have read it; their parts are not shown again. Call it before the first token. They may be as long as a whole
        answer, so it yields to the event loop in between. Raises UnreadableAnswerError."""
        began = time.monotonic()
        for count, token in enumerate(self.output, 1):
            try:
                text, marker = self._read(token, count)
                if self._marked is not None:
                    self._marked.passed(text, marker)
            except Exception as error:
                raise self._unreadable(error) from error
            if time.monotonic() - began > RESUMED_SECONDS:
                await asyncio.sleep(0)
                began = time.monotonic()

    def take(self, token: Token) -> Delta | None:
        """None: already forwarded, or nothing is wanted any more. Raises GapError; UnreadableAnswerError."""
        position = token.position
        if self.finish is not None or position < self.next_position:
            return None
        if position > self.next_position:
            raise GapError(f"position {position} came, {self.next_position} was next")
        token_id = token.token_id
        self.output.append(token_id)
        self.next_position = position + 1
        self.new_tokens += 1
        try:
            if self._plain and not token.finish:
                return text_delta(self._shown_as, self._detokenizer.add(token_id), token)
            return self._delta(token)
        except Exception as error:
            raise self._unreadable(error) from error

    def _delta(self, token: Token) -> Delta:
        token_id = token.token_id
        ended = _FINISH.get(token.finish)
        text, marker = self._ending(token_id) if ended == "stop" else self._read(token_id, len(self.output))
        if self._stop.stopped:
            self.finish = "stop"
        elif ended is not None:
            rest = self._stop.add(self._detokenizer.flush(), ends=len(self.output) > self._min_tokens)
            text += rest + self._stop.flush()
            self.finish = "stop" if self._stop.stopped else ended
        if self._marked is None:
            made = Delta(self._shown_as, text, (token,), self.finish, None, self._stop.found)
        else:
            made = self._parsed(self._marked, text, marker, token)
        if ended != "stop" or self._stop.stopped or token_id not in self._stop_ids:
            return made
        return made._replace(stop_token=token_id)

    def _ending(self, token_id: int) -> tuple[str, None]:
        """The text of the token that stops the answer, in which no stop string is looked for. It may be an ordinary word,
        a stop id, and is shown, as in vLLM, where a stop string is."""
        if not self._keeps_stop or token_id not in self._stop_ids:
            return "", None
        return self._stop.add(self._detokenizer.add(token_id), ends=False), None

    def _read(self, token_id: int, count: int) -> tuple[str, int | None]:
        """The text that can be shown now that the token came, and the token if it is a marker behind this text. `count`:
        of the choice's tokens up to this one. Stop strings count behind min_tokens of them, as in vLLM."""
        ends = count > self._min_tokens
        if self._marked is None or token_id not in self._marked.marker_texts:
            return self._stop.add(self._detokenizer.add(token_id), ends=ends), None
        # No stop string reaches over a marker, which is text between the two; it may be in the marker's own text.
        text = self._stop.add(self._detokenizer.complete(), ends=ends) + self._stop.flush()
        self._stop.add(self._marked.marker_texts[token_id], ends=ends)
        self._stop.flush()
        return text, None if self._stop.stopped else token_id

    def _parsed(self, marked: MarkedText, text: str, marker: int | None, token: Token) -> Delta:
        # The choice finishes with its parts: an error while they are parsed must not leave the request complete.
        finish, self.finish = self.finish, None
        parts = marked.passed(text, marker)
        if finish is not None:
            parts += marked.end(cut=finish == "length" or self._stop.stopped)
        cut = self._stop.stopped and marked.unfinished  # by a stop string: no call that could be carried out
        self.finish = "tool_calls" if finish == "stop" and marked.called and not cut else finish
        return Delta(self._shown_as, text, (token,), self.finish, parts, self._stop.found)

    def _unreadable(self, error: Exception) -> UnreadableAnswerError:
        """The error for the client; the log has what was raised."""
        log.error("choice %d cannot be read at token %d", self.index, self.new_tokens, exc_info=error)
        return UnreadableAnswerError(f"the answer cannot be read: {type(error).__name__}")


def _stop_ids(sampling: common_pb2.SamplingParams, text: ModelText) -> Collection[int]:
    """The request's stop_token_ids, without ends of the model that end the answer anyway."""
    own = sampling.stop_token_ids
    if not own:
        return ()
    return frozenset(own) if sampling.ignore_eos else frozenset(own).difference(text.eos_token_ids)
