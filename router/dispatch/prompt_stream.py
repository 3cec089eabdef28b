"""The prompt's tokens with their log probabilities, as the client has seen them so far; or its embedding."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from cluster.errors import BatonError, PeerLostError
from cluster.protocol.link import prompt_window_of
from router.link.token import Token
from router.request.completion import Completion


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

    @property
    def complete(self) -> bool:
        return self.next_position >= self.limit

    def takes(self, token: Token, choice: int, broken: Callable[[BatonError], None]) -> bool:
        """Whether the token is dealt with: it is of the prompt, which is `choice` in this attempt, or `broken` was called,
        because it leaves a gap or begins an answer before its prompt is complete."""
        position, wanted = token.position, self.next_position
        if token.choice != choice:
            if not self.complete:
                broken(PeerLostError(f"an answer began before position {wanted} of its prompt came"))
            return not self.complete
        if position >= min(wanted + 1, self.limit) or token.token_id != self._prompt[position]:
            broken(
                PeerLostError(f"token {token.token_id} of the prompt came at {position}, {wanted} was next")
            )
        elif position == wanted:
            self.next_position = position + 1
            self._forward(token)
        return True


class EmbeddingStream:
    """Forwards the prompt's embedding, which one attempt sends whole: those of further attempts are dropped."""

    limit = 2  # it has position 1

    def __init__(self, dimensions: int, forward: Callable[[Token], None]):
        self._bytes, self._forward = 4 * dimensions, forward
        self.next_position = 1

    @property
    def complete(self) -> bool:
        return self.next_position >= self.limit

    def takes(self, token: Token, choice: int, broken: Callable[[BatonError], None]) -> bool:
        """As PromptStream.takes. `broken`: the first token came without an embedding, or it has another length."""
        if token.choice != choice:
            if not self.complete:
                broken(PeerLostError("a token came before the embedding of its prompt"))
            return not self.complete
        if token.position != 1 or len(token.embedding) != self._bytes:
            size = len(token.embedding)
            broken(PeerLostError(f"an embedding of {size} bytes came at {token.position}, not {self._bytes}"))
        elif not self.complete:
            self.next_position = self.limit
            self._forward(token)
        return True


def prompt_stream_of(
    completion: Completion, forward: Callable[[Token], None]
) -> PromptStream | EmbeddingStream | None:
    """The reader of a prompt's log probabilities or of its embedding; None: the request asks for neither."""
    sampling = completion.sampling
    if sampling.pooling:
        return EmbeddingStream(completion.embedding_dimensions, forward)
    # A client that resumes behind tokens of the answer has the whole prompt, which precedes them.
    if sampling.prompt_logprobs and not completion.resume_tokens:
        return PromptStream(completion.prompt_tokens, forward)
    return None


class PromptCredit:
    """How far the worker of one attempt may send the prompt: a window beyond what came before the client read it all.
    An attempt begins at position 1, whatever an earlier one has brought."""

    def __init__(self, alternatives: int, grant: Callable[[int], None]):
        """`grant` is called with each new limit."""
        self._window = prompt_window_of(alternatives)
        self._grant = grant
        self.next_position = 1
        self._unread = 0  # tokens since the last grant
        self._granting = False

    @property
    def limit(self) -> int:
        return self.next_position + self._window

    def received(self, position: int, when_drained: Callable[[Callable[[], None]], None]) -> None:
        """Note the token at `position`. `when_drained` makes a call once the client has every token so far."""
        self.next_position = max(self.next_position, position + 1)
        self._unread += 1
        if self._unread >= (self._window + 1) // 2 and not self._granting:
            self._granting = True
            when_drained(self._drained)

    def _drained(self) -> None:
        self._granting, self._unread = False, 0
        self._grant(self.limit)
