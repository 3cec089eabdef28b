"""Compiled grammars, by the hash of their text; the least recently used ones are dropped."""

from __future__ import annotations

import threading
from collections import OrderedDict
from concurrent.futures import Future, ThreadPoolExecutor

from cluster.grammar.spec import GrammarSpec
from engine.sampling.grammar.base import CompiledGrammar, GrammarBackend

MOST_GRAMMARS = 32


class Grammars:
    """Keeps at most `most` compiled grammars. Thread-safe."""

    def __init__(self, backend: GrammarBackend, most: int = MOST_GRAMMARS):
        self._backend = backend
        self._most = most
        self._lock = threading.Lock()
        self._compiled = OrderedDict[bytes, CompiledGrammar]()
        self._thread: ThreadPoolExecutor | None = None

    def __len__(self) -> int:
        return len(self._compiled)

    def has(self, spec: GrammarSpec) -> bool:
        return spec.key in self._compiled

    def begin(self, spec: GrammarSpec) -> Future[CompiledGrammar]:
        """Start to compile a grammar on the store's one thread, so that `get` finds it later."""
        with self._lock:
            if self._thread is None:
                self._thread = ThreadPoolExecutor(1, "grammars")
            return self._thread.submit(self.get, spec)

    def get(self, spec: GrammarSpec) -> CompiledGrammar:
        """Return a compiled grammar; compile it if it is not in the store. Raises InvalidRequestError, ModelError."""
        with self._lock:
            if (found := self._compiled.get(spec.key)) is not None:
                self._compiled.move_to_end(spec.key)
                return found
        made = self._backend.compile(spec)
        with self._lock:
            self._compiled[spec.key] = made
            while len(self._compiled) > self._most:
                self._compiled.popitem(last=False)
        return made
