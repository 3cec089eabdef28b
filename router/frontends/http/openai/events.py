"""The events of a streamed answer.

choice, choice, … choice     one event per batch of tokens; with continuous_usage_stats each has the usage so far
the last choice's finish     with `baton`, which is complete only after the last text was sent
usage                        without choices; only with include_usage
[DONE]
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import orjson

from cluster.errors import BatonError
from router.frontends.http.errors import error_body
from router.frontends.http.openai.parts import split
from router.frontends.http.openai.requests import StreamOptions
from router.frontends.http.openai.shapes import Shape, UsageSoFar, baton, usage
from router.request.answer_parts import ContentText
from router.request.completion import Delta, Outcome

_DONE = b"data: [DONE]\n\n"


class Events:
    """Encodes the events of one answer with `choices` choices over all its prompts."""

    kept = 0  # its last events repeat nothing

    def __init__(self, shape: Shape, choices: int, wanted: StreamOptions, prompt_tokens: int):
        self._shape = shape
        self._unfinished = choices
        self._wanted = wanted
        self._so_far = UsageSoFar(prompt_tokens)
        self._begun: set[int] = set()
        # What stands around the text of each choice's further deltas, where that is all they have
        self._around: dict[int, tuple[bytes, bytes]] = {}
        self._last: Delta | None = None  # the delta that ends the last choice, held back for `end`
        self._before = shape.before_choice()
        self._after = b',"usage":null}\n\n' if wanted.include_usage else b"}\n\n"  # behind the choice

    def of(self, deltas: Sequence[Delta]) -> bytes:
        """Encode deltas that arrived together, for one write."""
        frames: list[bytes] = []
        for delta in deltas:
            around = self._around.get(delta.choice) if delta.finish is None else None
            if around is not None and delta.parts is None:
                frames += (around[0], orjson.dumps(delta.text), around[1])
                continue
            shown = delta if delta.finish is None else self._without_last_finish(delta)
            if shown is None:
                continue
            if shown.parts is None:
                self._add(frames, shown)
            else:
                self._add_parts(frames, shown, around)
        return b"".join(frames)

    def _add_parts(self, frames: list[bytes], delta: Delta, around: tuple[bytes, bytes] | None) -> None:
        """A delta without parts is shown only where it has more, or is the first one: a parser may hold back much."""
        parts = tuple(self._shape.view.shown(delta.parts or ()))
        if around is not None and all(isinstance(part, ContentText) for part in parts):
            if parts:
                text = "".join(part.text for part in parts if isinstance(part, ContentText))
                frames += (around[0], orjson.dumps(text), around[1])
            return
        for one in split(delta._replace(parts=parts)):
            self._add(frames, one)

    def end(self, outcomes: Sequence[Outcome]) -> bytes:
        """Encode the end of the stream; call it once every choice has finished."""
        assert self._last is not None, "every choice has finished"
        more = self._beside(self._last.choice)
        last = self._shape.chunk([self._choice(self._last)]) | more
        last["baton"] = baton(outcomes[-1], admin=self._shape.admin)
        if self._wanted.continuous_usage_stats:
            last["usage"] = orjson.Fragment(self._so_far.with_delta(self._last))
        elif self._wanted.include_usage:
            last["usage"] = None
        frames = event(last)
        if self._wanted.include_usage:
            frames += event({**self._shape.chunk([]), "usage": usage(outcomes, parsed=self._shape.parsed)})
        return frames + _DONE

    def failed(self, error: BatonError) -> bytes:
        """Encode the event that ends a stream in place of the rest."""
        return event(error_body(error))

    def _without_last_finish(self, delta: Delta) -> Delta | None:
        self._unfinished -= 1
        if self._unfinished:
            return delta
        shows = delta.text or delta.echo if delta.parts is None else self._shape.view.shown(delta.parts)
        if not shows:
            self._last = delta
            return None
        without = () if delta.parts is not None else None
        self._last = delta._replace(text="", tokens=(), prompt=(), parts=without, echo=b"")
        return delta._replace(finish=None)

    def _add(self, frames: list[bytes], delta: Delta) -> None:
        more = self._beside(delta.choice)
        frames += (self._before, orjson.dumps(self._choice(delta)), b"]")
        if more:
            frames += (b",", orjson.dumps(more)[1:-1])
        if self._wanted.continuous_usage_stats:
            frames += (b',"usage":', self._so_far.with_delta(delta), b"}\n\n")
        else:
            frames.append(self._after)

    def _beside(self, choice: int) -> dict[str, Any]:
        """Fields of a chunk beside this choice, if it is the first one with it."""
        return {} if choice in self._begun else self._shape.of_first_chunk(choice)

    def _choice(self, delta: Delta) -> dict[str, Any]:
        first = delta.choice not in self._begun
        if first:
            self._begun.add(delta.choice)
            around = self._shape.around_text(delta.choice)
            if around is not None and not self._wanted.continuous_usage_stats:
                self._around[delta.choice] = self._before + around[0], around[1] + b"]" + self._after
        return self._shape.delta(delta.choice, delta, first)


def event(data: Mapping[str, Any]) -> bytes:
    return b"data: " + orjson.dumps(data) + b"\n\n"
