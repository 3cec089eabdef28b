"""The grammar masks of a step's rows, filled on a thread of their own while the device or other cores compute the step.

    schedule ─► prepare ─► forward pass ─────────────► of ─► draw
                   └─────► accept the last token, fill ─┘

The matcher of a sequence is made when its first mask is needed, from the output so far, and follows the output from then
on. So it is right after a hand-off, after a preemption and where a stream is resumed.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from weakref import WeakKeyDictionary

import numpy as np

from cluster.errors import EngineRequestError, GrammarDeadEndError, InvalidRequestError, engine_request_error
from engine.compiled_grammar import CompiledGrammar, Matcher, Words
from engine.sampling.grammar.base import word_count
from engine.sampling.grammar.store import Grammars
from engine.scheduler.sequence import Sequence

MASK_SECONDS = 1.0  # of waiting for one mask: the step is the other requests' too


class _Followed:
    """A sequence's matcher, and how much of its output the matcher has accepted."""

    def __init__(self, matcher: Matcher, vocab: int):
        self.matcher = matcher
        self.accepted = 0
        # The last mask. Its draw copies it before the next one is filled.
        self.words: Words = np.zeros(word_count(vocab), dtype=np.int64)


class GrammarMasks:
    """`active`: whether requests may have a grammar; while it is False, steps skip all work for masks."""

    def __init__(self, grammars: Grammars, vocab: int):
        self.active = False
        self._grammars = grammars
        self._vocab = vocab
        self._followed = WeakKeyDictionary[Sequence, _Followed]()
        self._filling: dict[Sequence, Future[Words]] = {}
        self._thread: ThreadPoolExecutor | None = None

    def prepare(self, sequences: Seq[Sequence]) -> None:
        """Begin to fill the masks of sequences with a grammar, for the draws of this step."""
        for sequence in sequences:
            self._filling[sequence] = self._begin(sequence)

    def _begin(self, sequence: Sequence) -> Future[Words]:
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, "grammar-masks")
        return self._thread.submit(self._fill, sequence)

    def of(self, sequence: Sequence) -> Words | None:
        """The mask for the token after the sequence's last one; None without a grammar. Raises EngineRequestError, after
        MASK_SECONDS at the latest."""
        if sequence.request.grammar is None:
            return None
        begun = self._filling.pop(sequence, None) or self._begin(sequence)
        for _ in range(2):
            try:
                return begun.result(MASK_SECONDS)
            except CancelledError:
                pass
            except TimeoutError:
                assert self._thread is not None, "it was begun there"
                waited = begun.cancel()
                self._thread.shutdown(wait=False, cancel_futures=True)
                self._thread = None
                if not waited:
                    break
            begun = self._begin(sequence)  # another one took too long, and that one is to fail
        raise GrammarDeadEndError(
            "grammar: the tokens that it allows next take too long to find",
            field="grammar",
            limit=f"{MASK_SECONDS:g} s",
        )

    def _fill(self, sequence: Sequence) -> Words:
        followed = self._followed.get(sequence)
        try:
            if followed is None:
                followed = _Followed(self._compiled(sequence).matcher(), self._vocab)
                self._followed[sequence] = followed
            output = sequence.tokens[sequence.num_prompt :]
            followed.matcher.accept(output[followed.accepted :])
            followed.accepted = len(output)
            followed.matcher.fill(followed.words)
            return followed.words
        except InvalidRequestError as error:
            raise EngineRequestError(error.message, field="grammar") from error
        except Exception as error:
            raise engine_request_error(error) from error
        except BaseException as error:  # the library's panics; one must not end the engine
            raise EngineRequestError(f"grammar: {type(error).__name__}", field="grammar") from error

    def _compiled(self, sequence: Sequence) -> CompiledGrammar:
        """That of the request: workers compile it before they add the request, so that no step waits for it."""
        request = sequence.request
        assert request.grammar is not None, "only sequences with one have masks"
        return self._grammars.get(request.grammar) if request.compiled is None else request.compiled
