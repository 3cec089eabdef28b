"""Compiled grammars, by tenant and the hash of their text."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from weakref import WeakValueDictionary

from cluster.grammar.spec import GrammarSpec
from cluster.tenant_cache import TenantCache
from engine.compiled_grammar import CompiledGrammar
from engine.sampling.grammar.base import GrammarBackend

MAX_CACHED = 128
MAX_CACHED_BYTES = 64 << 20


class Grammars:
    """Finds each compiled grammar of a tenant as long as a request holds it, and beyond that the ones used last: at most
    `most`, of `most_bytes` together, by what they have grown to since. Thread-safe.

    Equal grammars of two tenants are compiled twice: neither learns by the time of its first token, or by masks that are
    found already, that another one has used the same.
    """

    def __init__(self, backend: GrammarBackend, most: int = MAX_CACHED, most_bytes: int = MAX_CACHED_BYTES):
        self._backend = backend
        self._most, self._most_bytes = most, most_bytes
        self._lock = threading.Lock()
        self._held = WeakValueDictionary[tuple[str, bytes], CompiledGrammar]()
        self._cached = TenantCache[CompiledGrammar]()

    @property
    def cached(self) -> int:
        return len(self._cached)

    @property
    def cached_bytes(self) -> int:
        """Matchers add to their grammar's size."""
        return _bytes_of(self._cached.values())

    def find(self, spec: GrammarSpec, tenant: str) -> CompiledGrammar | None:
        with self._lock:
            found = self._held.get((tenant, spec.key))
            if found is not None:
                self._cache((tenant, spec.key), found)
            return found

    def get(self, spec: GrammarSpec, tenant: str) -> CompiledGrammar:
        """Return a compiled grammar; compile it if it is not found. Raises InvalidRequestError, ModelError."""
        if (found := self.find(spec, tenant)) is not None:
            return found
        made = self._backend.compile(spec)
        with self._lock:
            self._held[tenant, spec.key] = made
            self._cache((tenant, spec.key), made)
        return made

    def _cache(self, key: tuple[str, bytes], grammar: CompiledGrammar) -> None:
        """As the one used last."""
        self._cached[key] = grammar
        if len(self._cached) > self._most:
            self._cached.drop_oldest_of_largest(len)
        size = self.cached_bytes
        while size > self._most_bytes:
            size -= self._cached.drop_oldest_of_largest(_bytes_of).size_bytes


def _bytes_of(grammars: Iterable[CompiledGrammar]) -> int:
    return sum(one.size_bytes for one in grammars)
