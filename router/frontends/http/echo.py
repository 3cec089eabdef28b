"""Completions whose prompts precede their answers (`echo`)."""

from __future__ import annotations

from collections.abc import Sequence

from router.request.completion import Completion, Delta


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
