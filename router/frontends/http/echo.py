"""Completions whose prompts precede their answers (`echo`)."""

from __future__ import annotations

from collections.abc import Sequence

from cluster.errors import BatonError
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
        pairs = [
            (text, one) for one, text in zip(completions, texts, strict=True) for _ in range(one.n)
        ]  # by choice of the whole answer
        self._waiting = {
            index: (text, _start(index, one) if one.sampling.prompt_logprobs else ())
            for index, (text, one) in enumerate(pairs)
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
                text, start = waiting
                if delta.tokens:
                    shown.append(Delta(choice, text, (), prompt=start))
                else:
                    delta = delta._replace(text=text + delta.text, prompt=start + prompt)
            shown.append(delta)
        return shown


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

    def of(self, deltas: Sequence[Delta]) -> bytes:
        return self._answer.of(self._echo.of(deltas))

    def end(self, outcomes: Sequence[Outcome]) -> bytes:
        return self._answer.end(outcomes)

    def failed(self, error: BatonError) -> bytes:
        return self._answer.failed(error)
