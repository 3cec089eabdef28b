"""Completions whose prompts precede their answers (`echo`)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property

import orjson

from cluster.errors import BatonError
from router.frontends.http.connection.exchange import Written
from router.frontends.http.connection.long_body import SLICE_BYTES
from router.frontends.http.serving import Form, StreamedAnswer, WholeAnswer
from router.link.token import PlainToken, Token
from router.request.completion import Completion, Delta, Outcome


class EchoForm:
    """Another form, of answers whose prompts precede them."""

    def __init__(self, form: Form, completions: Sequence[Completion], texts: Sequence[str]):
        """`texts`: of the prompts, one for each completion."""
        self._form, self._completions, self._texts = form, completions, texts

    def whole(self, choices: int) -> WholeAnswer:
        return _WholeEcho(self._form.whole(choices), Echo(self._completions, self._texts))

    def streamed(self, choices: int) -> StreamedAnswer:
        return _StreamedEcho(self._form.streamed(choices), Echo(self._completions, self._texts))


class Echo:
    """Puts each choice's prompt before its first delta. Of a prompt-only completion the prompt is all of the answer."""

    def __init__(self, completions: Sequence[Completion], texts: Sequence[str]):
        """`texts`: of the prompts, one for each completion."""
        prompts = map(_Prompt, texts)
        # By choice of the whole answer
        pairs = [
            (prompt, one) for one, prompt in zip(completions, prompts, strict=True) for _ in range(one.n)
        ]
        self._waiting = {
            index: (prompt, _start(index, one) if one.sampling.prompt_logprobs else ())
            for index, (prompt, one) in enumerate(pairs)
        }
        self._prompt_only = {index for index, (_, one) in enumerate(pairs) if one.prompt_only}

    def of(self, deltas: Sequence[Delta]) -> list[Delta]:
        shown: list[Delta] = []
        for delta in deltas:
            choice, prompt = delta.choice, delta.prompt
            if choice in self._prompt_only:
                if not prompt and delta.finish is None:
                    continue
                delta = Delta(choice, "", (), delta.finish and "length", prompt=prompt)
            if (waiting := self._waiting.pop(choice, None)) is not None:
                echoed, start = waiting
                if delta.tokens:
                    shown.append(Delta(choice, "", (), prompt=start, echo=echoed.json))
                else:
                    delta = delta._replace(prompt=start + prompt, echo=echoed.json)
            shown.append(delta)
        return shown


class _Prompt:
    """A prompt's text. Sixteen choices of 4,000 tokens took 12 MB, and 30 ms of the event loop, when each encoded it."""

    def __init__(self, text: str):
        self._text = text

    @cached_property
    def json(self) -> bytes:
        """Made with the first answer to this prompt, not for all prompts of a request at once."""
        return orjson.dumps(self._text)[1:-1]


def _start(choice: int, completion: Completion) -> tuple[Token, ...]:
    """The prompt's first token, which has no log probability."""
    return (PlainToken(choice, 0, completion.prompt_tokens[0]),)


class _WholeEcho:
    def __init__(self, answer: WholeAnswer, echo: Echo):
        self._answer, self._echo = answer, echo

    def add(self, deltas: Sequence[Delta]) -> None:
        self._answer.add(self._echo.of(deltas))

    def body(self, outcomes: Sequence[Outcome]) -> Sequence[bytes]:
        return self._answer.body(outcomes)


class _StreamedEcho:
    def __init__(self, answer: StreamedAnswer, echo: Echo):
        self._answer, self._echo = answer, echo

    @property
    def kept(self) -> int:
        return self._answer.kept

    def of(self, deltas: Sequence[Delta]) -> Written:
        """Deltas with prompts one by one, when each is written: together they are many times the request."""
        shown = self._echo.of(deltas)
        return (
            self._one_by_one(shown)
            if sum(len(one.echo) for one in shown) > SLICE_BYTES
            else self._answer.of(shown)
        )

    def _one_by_one(self, deltas: Sequence[Delta]) -> Iterator[bytes]:
        for delta in deltas:
            frames = self._answer.of([delta])
            if isinstance(frames, bytes):
                yield from (frames,) if frames else ()
            else:
                yield from frames

    def end(self, outcomes: Sequence[Outcome]) -> Written:
        return self._answer.end(outcomes)

    def failed(self, error: BatonError) -> Written:
        return self._answer.failed(error)
