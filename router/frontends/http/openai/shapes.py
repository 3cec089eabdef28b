"""OpenAI's objects for completions and chats, whole and in chunks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, NamedTuple

import orjson

from router.frontends.http.connection.long_body import Lists
from router.frontends.http.openai.parts import WHOLE_VIEW, ChatView, Collected, delta_fields
from router.link.token import Token
from router.request.completion import Completion, Delta, Outcome
from router.request.permissions import ADMIN_TIMINGS
from router.text.token_bytes import TextOffsets, TokenPieces
from router.text.tokenizer import ModelText
from wire import inference_pb2

Text = str | orjson.Fragment


def _timings_for(*, admin: bool) -> tuple[list[str], Callable[[inference_pb2.Timings], tuple[Any, ...]]]:
    """The timings that a client may see: their names, and what reads their values."""
    names = [field.name for field in inference_pb2.Timings.DESCRIPTOR.fields]
    names = [name for name in names if admin or name not in ADMIN_TIMINGS]
    return names, attrgetter(*names)


_TIMINGS = {admin: _timings_for(admin=admin) for admin in (False, True)}


def usage(outcomes: Sequence[Outcome], *, parsed: bool = False) -> dict[str, Any]:
    """`parsed`: with the tokens of reasoning."""
    prompt = sum(outcome.usage.prompt_tokens for outcome in outcomes)
    completion = sum(outcome.usage.completion_tokens for outcome in outcomes)
    cached = sum(outcome.usage.cached_tokens for outcome in outcomes)
    made: dict[str, Any] = {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached},
    }
    if parsed:
        reasoning = sum(outcome.usage.reasoning_tokens for outcome in outcomes)
        made["completion_tokens_details"] = {"reasoning_tokens": reasoning}
    return made


class UsageSoFar:
    """Running usage of one stream over all its choices. The number of cached prompt tokens is known only at the end."""

    def __init__(self, prompt_tokens: int):
        self._prompt = prompt_tokens
        self._completion = 0

    def with_delta(self, delta: Delta) -> bytes:
        self._completion += len(delta.tokens)
        total = self._prompt + self._completion
        return orjson.dumps(
            {
                "prompt_tokens": self._prompt,
                "completion_tokens": self._completion,
                "total_tokens": total,
            }
        )


def baton(outcome: Outcome, *, admin: bool) -> dict[str, Any]:
    """The `baton` object: timings (seconds), bytes shipped, transport; for admins also queues and workers."""
    names, values_of = _TIMINGS[admin]
    shown: dict[str, Any] = dict(zip(names, values_of(outcome.timings), strict=True))
    if outcome.explanation:
        shown["explanation"] = outcome.explanation
    return shown


def token_logprobs(tokens: Sequence[Token], pieces: TokenPieces) -> list[dict[str, Any]]:
    """Entries for tokens of a chat or a response, each with its alternatives."""
    return [
        {
            **_scored(pieces, token.token_id, token.logprob),
            "top_logprobs": [_scored(pieces, top.token_id, top.logprob) for top in token.top_logprobs],
        }
        for token in tokens
    ]


def _scored(pieces: TokenPieces, token_id: int, logprob: float) -> dict[str, Any]:
    shown = {"token": pieces.text_of(token_id), "logprob": logprob}
    return {**shown, "bytes": list(pieces.bytes_of(token_id))}


class Answer:
    """One choice of a whole answer, collected delta by delta.

    Log probabilities are encoded as they arrive: at the end of a large answer, encoding them would block the event loop
    for half a second.
    """

    def __init__(self, shape: Shape, index: int, prompt: list[bytes] | None = None):
        """`prompt`: the entries of a choice of the same prompt, which shows them too."""
        self.index = index
        self.ended: tuple[str | None, str | int | None] = None, None  # why, and what of the request did
        self.token_ids: list[int] = []
        self._shape = shape
        self._text: list[str] = []
        self._echo = b""
        self._parts = Collected()
        # By field: pieces of its list, as JSON without brackets
        self._logprobs: dict[str, list[bytes]] = {}
        self._shares_prompt = prompt is not None
        # Entries of vLLM's prompt_logprobs, as JSON
        self.prompt = [b"null"] if prompt is None else prompt

    def message(self, lists: Lists) -> dict[str, Any]:
        if self._shape.parsed:
            return {"message": self._parts.message()}
        text = "".join(self._text)
        if self._echo:
            marked = b'"' + lists.mark(self._echo) + orjson.dumps(text)[1:]
            return self._shape.message(orjson.Fragment(marked))
        return self._shape.message(text)

    def add(self, delta: Delta) -> None:
        if delta.parts is None:
            self._text.append(delta.text)
            self._echo = delta.echo or self._echo
        else:
            self._parts.add(self._shape.view.shown(delta.parts))
        self.token_ids += [token.token_id for token in delta.tokens]
        self.ended = (delta.finish, delta.stop_reason) if delta.finish else self.ended
        for name, values in (self._shape.logprobs(self.index, self._shape.scored(delta)) or {}).items():
            if values:
                self._logprobs.setdefault(name, []).append(orjson.dumps(values)[1:-1])
        if self._shape.prompt.alternatives is not None and not self._shares_prompt:
            entries = (self._shape.prompt_entry(token) for token in delta.prompt if token.position)
            self.prompt += map(orjson.dumps, entries)

    def prompt_logprobs(self, lists: Lists) -> dict[str, Any]:
        """The field, where it is asked for."""
        if self._shape.prompt.alternatives is None:
            return {}
        return {"prompt_logprobs": lists.add(self.prompt)}

    def logprobs(self, lists: Lists) -> dict[str, Any] | None:
        """The shape's object for them, with lists that are encoded already."""
        empty = self._shape.logprobs(self.index, ())
        if empty is None:
            return None
        return empty | {name: lists.add(pieces) for name, pieces in self._logprobs.items()}


class WholeShape:
    """Collects the answers of all choices."""

    def __init__(self, shape: Shape, choices: int):
        self._shape = shape
        self._answers: list[Answer] = []
        for index in range(choices):
            first = index - index % shape.completion.n
            shared = self._answers[first].prompt if first < index else None
            self._answers.append(Answer(shape, index, shared))

    def add(self, deltas: Sequence[Delta]) -> None:
        for delta in deltas:
            self._answers[delta.choice].add(delta)

    def body(self, outcomes: Sequence[Outcome]) -> list[bytes]:
        lists = Lists()
        choices = [self._shape.choice(answer, lists) for answer in self._answers]
        whole = self._shape.whole(choices, outcomes)
        return lists.encode(whole | self._shape.of_whole(self._answers[0], lists))


class PromptIds:
    """Token ids of a request's prompts, as JSON."""

    def __init__(self, prompts: Sequence[Sequence[int]], n: int):
        """`n`: choices of each."""
        self._prompts, self._n = prompts, n
        self._encoded: dict[int, bytes] = {}

    def of(self, choice: int) -> bytes:
        """The ids of a choice's prompt in a whole answer, encoded once for all of its choices."""
        place = choice // self._n
        if place not in self._encoded:
            self._encoded[place] = orjson.dumps(self._prompts[place])
        return self._encoded[place]

    def once(self, choice: int) -> bytes:
        """The ids of a choice's prompt in a stream; none for its further choices: all together could be too long."""
        place = choice // self._n
        if place in self._encoded:
            return b""
        self._encoded[place] = b""
        return orjson.dumps(self._prompts[place])


class PromptShown(NamedTuple):
    """The parts of its prompt that an answer shows."""

    echoes: bool = False
    alternatives: int | None = None  # vLLM's prompt_logprobs
    ids: PromptIds | None = None  # vLLM's prompt_token_ids, which return_token_ids asks for


@dataclass(frozen=True)
class Shape:
    """One endpoint's objects."""

    completion: Completion
    text: ModelText
    created: int
    id: str
    token_ids: bool  # vLLM's return_token_ids
    admin: bool = True  # whether the client may see workers and queueing times
    view: ChatView = WHOLE_VIEW
    prompt: PromptShown = PromptShown()

    id_prefix = ""
    object_name = ""
    chunk_name = ""

    @property
    def parsed(self) -> bool:
        return self.completion.answer_format is not None

    def head(self, name: str) -> dict[str, Any]:
        return {"id": self.id, "object": name, "created": self.created, "model": self.completion.model}

    def whole(self, choices: list[dict[str, Any]], outcomes: Sequence[Outcome]) -> dict[str, Any]:
        return {
            **self.head(self.object_name),
            "choices": choices,
            "usage": usage(outcomes, parsed=self.parsed),
            "baton": baton(outcomes[-1], admin=self.admin),
        }

    def chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {**self.head(self.chunk_name), "choices": choices}

    def before_choice(self) -> bytes:
        """The constant JSON before the choice of every streamed chunk, encoded once per answer."""
        return b"data: " + orjson.dumps(self.head(self.chunk_name))[:-1] + b',"choices":['

    def around_text(self, index: int) -> tuple[bytes, bytes] | None:
        """The constant JSON around the text of a choice's further deltas. None: they have more than text."""
        if self.token_ids or self.completion.sampling.logprobs:
            return None
        shown = self._shown(index, self.message_delta("", False), [], None, None)
        before, _, after = orjson.dumps(shown).partition(b'""')
        return before, after

    def choice(self, answer: Answer, lists: Lists) -> dict[str, Any]:
        message = answer.message(lists)
        shown = self._shown(answer.index, message, answer.token_ids, answer.logprobs(lists), *answer.ended)
        return shown | self.of_choice(answer, lists)

    def of_choice(self, answer: Answer, lists: Lists) -> dict[str, Any]:
        """Further fields of a whole choice."""
        return {}

    def of_whole(self, answer: Answer, lists: Lists) -> dict[str, Any]:
        """Further fields of a whole answer, which are those of its first choice."""
        return {}

    def of_first_chunk(self, index: int) -> dict[str, Any]:
        """Further fields of the first chunk of a choice, beside `choices`."""
        return {}

    def of_first_choice(self, index: int) -> dict[str, Any]:
        """Further fields of the choice in its first chunk."""
        return {}

    def prompt_ids(self, index: int, lists: Lists | None = None) -> dict[str, Any]:
        """The field with the prompt of a choice, where it is asked for. `lists`: of a whole answer, else of a stream."""
        if (ids := self.prompt.ids) is None:
            return {}
        encoded = ids.once(index) if lists is None else lists.mark(ids.of(index))
        return {"prompt_token_ids": orjson.Fragment(encoded)} if encoded else {}

    def scored(self, delta: Delta) -> Sequence[Token]:
        """The delta's tokens whose log probabilities are shown beside the text."""
        return (*delta.prompt, *delta.tokens) if self.prompt.echoes else delta.tokens

    def prompt_entry(self, token: Token) -> dict[str, Any]:
        """A token of the prompt and its alternatives, by token id, as vLLM has them."""
        top = token.top_logprobs[: self.prompt.alternatives]
        ranked = [(token.token_id, token.logprob, token.rank)]
        ranked += [(one.token_id, one.logprob, rank) for rank, one in enumerate(top, 1)]
        text_of = self.text.pieces.text_of
        return {
            str(token_id): {"logprob": logprob, "rank": rank, "decoded_token": text_of(token_id)}
            for token_id, logprob, rank in reversed(ranked)
        }

    def delta(self, index: int, delta: Delta, first: bool) -> dict[str, Any]:
        token_ids = [token.token_id for token in delta.tokens]
        text = orjson.Fragment(b'"' + delta.echo + orjson.dumps(delta.text)[1:]) if delta.echo else delta.text
        message = self.message_delta(text, first)
        if delta.parts is not None:
            role = {"role": "assistant"} if first else {}
            message = {"delta": role | delta_fields(self.view.shown(delta.parts))}
        logprobs = self.logprobs(index, self.scored(delta))
        shown = self._shown(index, message, token_ids, logprobs, delta.finish, delta.stop_reason)
        return shown | self.of_first_choice(index) if first else shown

    def _shown(
        self,
        index: int,
        message: dict[str, Any],
        token_ids: list[int],
        logprobs: dict[str, Any] | None,
        finish: str | None,
        stop_reason: str | int | None = None,  # vLLM's
    ) -> dict[str, Any]:
        shown = {"index": index, **message, "logprobs": logprobs, "finish_reason": self.view.finish(finish)}
        if finish is not None:
            shown["stop_reason"] = stop_reason
        if self.token_ids:
            shown["token_ids"] = token_ids
        return shown

    def message(self, text: Text) -> dict[str, Any]:
        raise TypeError("use ChatShape or CompletionShape")

    def message_delta(self, text: Text, first: bool) -> dict[str, Any]:
        raise TypeError("use ChatShape or CompletionShape")

    def logprobs(self, index: int, tokens: Sequence[Token]) -> dict[str, Any] | None:
        """Lists by field for consecutive tokens of a choice; None if the request does not ask for them."""
        raise TypeError("use ChatShape or CompletionShape")


class ChatShape(Shape):
    id_prefix = "chatcmpl-"
    object_name = "chat.completion"
    chunk_name = "chat.completion.chunk"

    def of_whole(self, answer: Answer, lists: Lists) -> dict[str, Any]:
        return answer.prompt_logprobs(lists) | self.prompt_ids(answer.index, lists)

    def of_first_chunk(self, index: int) -> dict[str, Any]:
        return self.prompt_ids(index)

    def message(self, text: Text) -> dict[str, Any]:
        return {"message": {"role": "assistant", "content": text, "refusal": None}}

    def message_delta(self, text: Text, first: bool) -> dict[str, Any]:
        return {"delta": {"content": text, "role": "assistant"} if first else {"content": text}}

    def logprobs(self, index: int, tokens: Sequence[Token]) -> dict[str, Any] | None:
        if not self.completion.sampling.logprobs:
            return None
        return {"content": token_logprobs(tokens, self.text.pieces), "refusal": None}


@dataclass(frozen=True)
class CompletionShape(Shape):
    id_prefix = "cmpl-"
    object_name = "text_completion"
    chunk_name = "text_completion"
    offsets: dict[int, TextOffsets] = field(default_factory=dict)  # by choice, over all chunks of its stream

    def of_choice(self, answer: Answer, lists: Lists) -> dict[str, Any]:
        return answer.prompt_logprobs(lists) | self.prompt_ids(answer.index, lists)

    def of_first_choice(self, index: int) -> dict[str, Any]:
        return self.prompt_ids(index)

    def message(self, text: Text) -> dict[str, Any]:
        return {"text": text}

    def message_delta(self, text: Text, first: bool) -> dict[str, Any]:
        return {"text": text}

    def logprobs(self, index: int, tokens: Sequence[Token]) -> dict[str, Any] | None:
        if not self.completion.sampling.logprobs:
            return None
        offsets = self.offsets.setdefault(index, TextOffsets(self.text.pieces))
        return {
            "tokens": [self._name(token.token_id) for token in tokens],
            "token_logprobs": [token.logprob if token.position else None for token in tokens],
            "top_logprobs": [self._top(token) if token.position else None for token in tokens],
            "text_offset": [offsets.next(token.token_id) for token in tokens],
        }

    def _top(self, token: Token) -> dict[str, float]:
        """The token and its alternatives by their text."""
        count = self.completion.sampling.top_logprobs
        top = {self._name(one.token_id): one.logprob for one in token.top_logprobs[:count]}
        return top | {self._name(token.token_id): token.logprob}

    def _name(self, token_id: int) -> str:
        """The token's text, marked as OpenAI does if it is not whole characters: this endpoint has no field for bytes."""
        pieces = self.text.pieces
        text = pieces.text_of(token_id)
        return text if text.encode() == pieces.bytes_of(token_id) else f"bytes:{text}"
