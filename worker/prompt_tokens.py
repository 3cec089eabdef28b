"""Tokens of a prompt with their log probabilities, as a log keeps them: packed, each a message only when it is sent."""

from __future__ import annotations

from collections import deque

from engine.prompt_scores import Scores
from wire import common_pb2


class PromptTokens(dict[int, common_pb2.Token]):
    """Tokens by position: messages, and packed scores of consecutive positions, of which `get` makes a message."""

    def __init__(self, choice: int):
        super().__init__()
        self._choice = choice
        self._packed: deque[tuple[int, Scores]] = deque()  # in order of position
        self._made: common_pb2.Token | None = None  # the last message: a large one is sent in pieces

    def __bool__(self) -> bool:
        return bool(self._packed) or len(self) > 0

    def add(self, position: int, scores: Scores) -> None:
        """Add the scores of the tokens from `position` on."""
        self._packed.append((position, scores))

    def get(self, position: int, default: common_pb2.Token | None = None) -> common_pb2.Token | None:  # type: ignore[override]
        if self._made is not None and self._made.position == position:
            return self._made
        # One for each step that computed a part of the prompt and is not read
        for first, scores in self._packed:
            if first <= position < first + len(scores):
                self._made = self._message(position, scores, position - first)
                return self._made
        return super().get(position, default)

    def drop_before(self, position: int) -> None:
        """Forget the tokens before `position`."""
        while self._packed and self._packed[0][0] + len(self._packed[0][1]) <= position:
            self._packed.popleft()

    def _message(self, position: int, scores: Scores, row: int) -> common_pb2.Token:
        ids, logprobs = scores.token_ids[row].tolist(), scores.logprobs[row].tolist()
        return common_pb2.Token(
            choice=self._choice,
            position=position,
            token_id=ids[0],
            logprob=logprobs[0],
            top_logprobs=[
                common_pb2.TokenLogprob(token_id=token_id, logprob=logprob)
                for token_id, logprob in zip(ids[1:], logprobs[1:], strict=True)
            ],
            rank=int(scores.ranks[row]),
        )
