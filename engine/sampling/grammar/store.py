"""Compiled grammars, by the hash of their text."""

from __future__ import annotations

import threading
from collections import OrderedDict
from weakref import WeakValueDictionary

from cluster.grammar.spec import GrammarSpec
from engine.compiled_grammar import CompiledGrammar
from engine.sampling.grammar.base import GrammarBackend

MAX_CACHED = 128
MAX_CACHED_BYTES = 64 << 20


class Grammars:
    """Finds each compiled grammar as long as a request holds it, and beyond that the ones used last: at most `most`, of
    `most_bytes` together, by what they have grown to since. Thread-safe."""

    def __init__(self, backend: GrammarBackend, most: int = MAX_CACHED, most_bytes: int = MAX_CACHED_BYTES):
        self._backend = backend
        self._most, self._most_bytes = most, most_bytes
        self._lock = threading.Lock()
        self._held = WeakValueDictionary[bytes, CompiledGrammar]()
        self._cached = OrderedDict[bytes, CompiledGrammar]()

    @property
    def cached(self) -> int:
        return len(self._cached)

    @property
    def cached_bytes(self) -> int:
        """Matchers add to their grammar's size."""
        return sum(one.size_bytes for one in self._cached.values())

    def find(self, spec: GrammarSpec) -> CompiledGrammar | None:
        with self._lock:
            found = self._held.get(spec.key)
            if found is not None:
                self._cache(spec.key, found)
            return found

    def get(self, spec: GrammarSpec) -> CompiledGrammar:
        """Return a compiled grammar; compile it if it is not found. Raises InvalidRequestError, ModelError."""
        if (found := self.find(spec)) is not None:
            return found
        made = self._backend.compile(spec)
        with self._lock:
            self._held[spec.key] = made
            self._cache(spec.key, made)
        return made

    def _cache(self, key: bytes, grammar: CompiledGrammar) -> None:
        """As the one used last."""
        self._cached[key] = grammar
        self._cached.move_to_end(key)
        size = self.cached_bytes
        while self._cached and (len(self._cached) > self._most or size > self._most_bytes):
            _, dropped = self._cached.popitem(last=False)
            size -= dropped.size_bytes
