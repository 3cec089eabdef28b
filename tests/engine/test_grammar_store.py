"""Requests hold their compiled grammars; beyond that a bounded number is cached."""

from __future__ import annotations

from collections import Counter
from typing import Any

from cluster.grammar.spec import GrammarSpec
from engine.sampling.grammar.store import Grammars


class Compiled:
    def __init__(self, size_bytes: int):
        self.size_bytes = size_bytes

    def matcher(self) -> Any:
        raise NotImplementedError


class Backend:
    def __init__(self) -> None:
        self.compiled = Counter[str]()

    def compile(self, spec: GrammarSpec) -> Compiled:
        self.compiled[spec.text] += 1
        return Compiled(len(spec.text))


def specs(*texts: str) -> list[GrammarSpec]:
    return [GrammarSpec("regex", text) for text in texts]


def test_what_a_request_holds_is_compiled_once_whatever_the_cache_holds():
    backend = Backend()
    grammars = Grammars(backend, most=2)
    wanted = specs(*"abcdefgh")
    held = [grammars.get(one) for one in wanted]
    assert [grammars.get(one) for one in wanted] == held
    assert set(backend.compiled.values()) == {1} and grammars.cached == 2


def test_what_no_request_holds_leaves_the_cache_by_number_and_by_bytes():
    grammars = Grammars(Backend(), most=3, most_bytes=10)
    a, b, c, large, larger = specs("a", "b", "c", 8 * "l", 11 * "l")
    for one in (a, b, c, a, large):  # `a` is used once more
        grammars.get(one)
    assert [grammars.find(one) is not None for one in (a, b, c, large)] == [True, False, True, True]
    grammars.get(larger)
    assert grammars.cached == 0 and grammars._cached_bytes == 0 and not grammars._held
