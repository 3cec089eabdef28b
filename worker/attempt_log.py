"""Output of one attempt that its router has not acknowledged yet: columns per choice, then one end.

Tokens stay until the router's credit acknowledges them, so a link that broke continues at any position that the router
may still ask for. A choice holds at most its share of a window of tokens; what is beyond it pauses the request at the
engine.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from cluster.protocol.link import WINDOW_TOKENS, prompt_window_of, window_of
from engine.request import PromptEmbedding, PromptOutput
from wire import common_pb2
from worker.prompt_tokens import PromptTokens

if TYPE_CHECKING:
    from engine.prompt_scores import Scores


class ChoiceLog:
    """Tokens of one choice: `tokens[i]` has position `first + i`."""

    __slots__ = ("choice", "extras", "first", "limit", "part", "sent", "tokens", "window")

    def __init__(self, choice: int, position: int, window: int):
        self.choice = choice
        self.window = window  # tokens that may be sent, and are kept, beyond the acknowledged ones
        self.first = position
        self.tokens: list[int] = []
        self.extras: dict[int, common_pb2.Token] = {}  # tokens that are more than an id, by position
        self.sent = position  # the next one to send
        self.part = 0  # top_logprobs, or bytes, of the token at `sent` that have been sent: a large one goes in pieces
        self.limit = position + window  # positions below it may be sent

    @property
    def end(self) -> int:
        """The position of the next token."""
        return self.first + len(self.tokens)

    def acknowledge(self, limit: int) -> bool:
        """Raise the limit; forget what that acknowledges. False: an older or the same limit."""
        limit = min(limit, self.end + self.window)
        if limit <= self.limit:
            return False
        self.limit = limit
        read = limit - self.window - self.first
        if read > 0:
            if self.extras:
                for position in range(self.first, self.first + read):
                    self.extras.pop(position, None)
            del self.tokens[:read]
            self.first += read
            if self.sent < self.first:  # the prefill worker may have sent the first token before
                self.sent, self.part = self.first, 0
        return True


class PromptLog(ChoiceLog):
    """Tokens of the prompt, all of which are computed at once: what is beyond the window waits here, packed."""

    __slots__ = ("packed",)

    def __init__(self, choice: int, window: int):
        super().__init__(choice, 1, window)
        self.extras = self.packed = PromptTokens(choice)

    def acknowledge(self, limit: int) -> bool:
        changed = super().acknowledge(limit)
        self.packed.drop_before(self.first)
        return changed

    def add(self, position: int, scores: Scores) -> None:
        """Raises ValueError unless `position` is the next one."""
        if position != self.end:
            raise ValueError(f"position {position} of the prompt came, {self.end} was next")
        self.packed.add(position, scores)
        self.tokens += scores.token_ids[:, 0].tolist()

    def add_embedding(self, token_id: int, vector: bytes) -> None:
        """Add the embedding as the one token, at position 1. Raises ValueError if there is one."""
        if self.end != self.first:
            raise ValueError(f"an embedding came, position {self.end} of the prompt was next")
        token = common_pb2.Token(choice=self.choice, position=self.first, token_id=token_id, embedding=vector)
        self.extras[self.first] = token
        self.tokens.append(token_id)


class AttemptLog:
    """Choices `first_choice` … of one attempt, whose next token has `position`, and the attempt's end."""

    def __init__(
        self, first_choice: int, choices: int, position: int, changed: Callable[[], None] = lambda: None
    ):
        """`changed` is called after the end, and after a token while it is not due."""
        self._first_choice = first_choice
        window = window_of(choices)
        self.choices = [ChoiceLog(first_choice + i, position, window) for i in range(choices)]
        # The last of `choices`, where log probabilities of the prompt are wanted, or its embedding
        self.prompt: PromptLog | None = None
        self._changed = changed
        self.end_event: common_pb2.AttemptEnd | None = None
        self.count = 0  # tokens, over its whole life
        self.is_due = False  # its link sends what is new with the next frame
        self.begun: ChoiceLog | None = None  # the last one of which a part of a large token was sent
        self._position = position
        self._give_back_room: Callable[[], None] | None = None

    @classmethod
    def of(cls, spec: common_pb2.GenerateSpec, changed: Callable[[], None]) -> AttemptLog:
        """The log of an attempt at `spec`: its tokens so far, counted in bytes of 4, give the position of the next one."""
        position = (len(spec.prompt_tokens) + len(spec.output_tokens)) // 4
        log = cls(spec.first_choice, max(1, spec.n), position, changed)
        if spec.sampling.prompt_logprobs or spec.sampling.pooling:
            log.add_prompt(spec.sampling.prompt_top_logprobs)
        return log

    def add_prompt(self, alternatives: int) -> None:
        """Take tokens of the prompt too, from position 1 on, as the choice after the last one."""
        window = prompt_window_of(alternatives)
        self.prompt = PromptLog(self._first_choice + len(self.choices), window)
        self.choices.append(self.prompt)

    def add_prompt_output(self, output: PromptOutput | PromptEmbedding) -> None:
        """Add tokens of the prompt, or its embedding. Raises ValueError unless that comes next."""
        if self.prompt is None:
            raise ValueError("nothing of the prompt is wanted")
        before = self.prompt.end
        if isinstance(output, PromptEmbedding):
            self.prompt.add_embedding(output.token_id, output.vector)
        else:
            self.prompt.add(output.position, output.scores)
        self.count += self.prompt.end - before
        if not self.is_due:
            self._changed()

    def hold_room(self, give_back: Callable[[], None]) -> None:
        """`give_back` is called once no more of the prompt waits here than its window, or by `release_room`."""
        self._give_back_room = give_back

    def release_room(self) -> None:
        if self._give_back_room is not None:
            give_back, self._give_back_room = self._give_back_room, None
            give_back()

    @property
    def in_order(self) -> list[ChoiceLog]:
        """The choices as they are sent: the prompt precedes its answers. Of these, one whose large token was sent in part
        precedes the others, so that a router has parts of one token per handle in memory."""
        ordered = self.choices if self.prompt is None else [self.prompt, *self.choices[:-1]]
        if self.begun is None or not self.begun.part:
            return ordered
        return sorted(ordered, key=lambda one: one is not self.begun)

    @property
    def ended(self) -> bool:
        return self.end_event is not None

    @property
    def full(self) -> bool:
        """A choice has filled its window: the request should pause."""
        for one in self.choices:  # noqa: SIM110  asked for every token: a generator would take three times as long
            if one.first + len(one.tokens) >= one.limit and one is not self.prompt:
                return True
        return False

    @property
    def all_sent(self) -> bool:
        return all(one.sent == one.end for one in self.choices)

    @property
    def may_send(self) -> bool:
        """A token could be sent now: of an answer only once all of the prompt is sent."""
        prompt = self.prompt
        if prompt is not None and prompt.sent < prompt.end:
            return prompt.sent < prompt.limit
        return any(one.sent < min(one.end, one.limit) for one in self.choices)

    def add(self, choice: int, position: int, token_id: int, extra: common_pb2.Token | None = None) -> None:
        """`extra`: the whole token, where it is more than its id. Raises ValueError unless it is its choice's next."""
        log = self.choices[choice - self._first_choice]
        if position != log.first + len(log.tokens):
            raise ValueError(f"choice {choice}: position {position} came, {log.end} was next")
        log.tokens.append(token_id)
        if extra is not None:
            log.extras[position] = extra
        elif log.extras:  # extras follow a frame's columns: after the first, all are extras
            log.extras[position] = common_pb2.Token(choice=choice, position=position, token_id=token_id)
        self.count += 1
        if not self.is_due:
            self._changed()

    def end(self, end: common_pb2.AttemptEnd) -> None:
        """End the attempt. Only the first end counts: later ones were on their way when it came."""
        if self.end_event is None:
            self.end_event = end
            self._changed()

    def widen(self) -> None:
        """Give each choice a whole window, as a router expects whose link is older than SHARED_WINDOW_VERSION."""
        for one in self.choices:
            if one is self.prompt:
                continue
            one.limit += WINDOW_TOKENS - one.window
            one.window = WINDOW_TOKENS

    def credit(self, choice: int, limit: int) -> bool:
        """Positions of the choice below `limit` may be sent. False: nothing has changed."""
        at = choice - self._first_choice
        changed = 0 <= at < len(self.choices) and self.choices[at].acknowledge(limit)
        self._look_at_room()
        return changed

    def _look_at_room(self) -> None:
        if self.prompt is not None and self.prompt.first + self.prompt.window >= self._position:
            self.release_room()

    def resume(self, positions: Sequence[int], limits: Sequence[int]) -> bool:
        """A router attaches and takes `positions` next, one per choice. False: not kept any more, or never made."""
        if not len(positions) == len(limits) == len(self.choices):
            return False
        if any(position < one.first for one, position in zip(self.choices, positions, strict=True)):
            return False
        for one, position, limit in zip(self.choices, positions, limits, strict=True):
            # What the prefill worker sent may not have come here yet.
            one.sent, one.part = min(position, one.end), 0
            one.acknowledge(limit)
        self._look_at_room()
        return True
