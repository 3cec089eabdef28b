"""Completions whose prompts precede their answers (`echo`)."""

from __future__ import annotations

from collections.abc import Sequence

from cluster.errors import BatonError
from router.frontends.http.serving import Form, StreamedAnswer, WholeAnswer
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
        pairs = [
            (text, one.prompt_only)
            for one, text in zip(completions, texts, strict=True)
            for _ in range(one.n)
        ]
        self._waiting = {
            index: text for index, (text, _) in enumerate(pairs)
        }  # by choice of the whole answer
        self._prompt_only = {index for index, (_, alone) in enumerate(pairs) if alone}

    def of(self, deltas: Sequence[Delta]) -> list[Delta]:
        shown: list[Delta] = []
        for delta in deltas:
            if delta.choice in self._prompt_only:
                if delta.finish is not None:
                    shown.append(Delta(delta.choice, self._waiting.pop(delta.choice), (), "length"))
                continue
            if (text := self._waiting.pop(delta.choice, None)) is not None:
                shown.append(Delta(delta.choice, text, ()))
            shown.append(delta)
        return shown


class _WholeEcho:
    def __init__(self, answer: WholeAnswer, echo: Echo):
        self._answer, self._echo = answer, echo

    def add(self, deltas: Sequence[Delta]) -> None:
        self._answer.add(self._echo.of(deltas))

    def body(self, outcomes: Sequence[Outcome]) -> bytes:
        return self._answer.body(outcomes)


class _StreamedEcho:
    def __init__(self, answer: StreamedAnswer, echo: Echo):
        self._answer, self._echo = answer, echo

    def of(self, deltas: Sequence[Delta]) -> bytes:
        return self._answer.of(self._echo.of(deltas))

    def end(self, outcomes: Sequence[Outcome]) -> bytes:
        return self._answer.end(outcomes)

    def failed(self, error: BatonError) -> bytes:
        return self._answer.failed(error)
