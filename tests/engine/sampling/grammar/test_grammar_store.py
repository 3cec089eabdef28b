"""Requests hold their compiled grammars; beyond that a bounded number is cached."""

from __future__ import annotations

import json
import random
from collections import Counter
from typing import Any

import pytest

from cluster.grammar.spec import GrammarSpec
from engine.sampling.grammar.base import all_allowed
from engine.sampling.grammar.llguidance_backend import LlguidanceBackend, estimated_bytes
from engine.sampling.grammar.store import Grammars
from tests.harness.model_text import VOCAB, write_tokenizer


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
    held = [grammars.get(one, "") for one in wanted]
    assert [grammars.get(one, "") for one in wanted] == held
    assert set(backend.compiled.values()) == {1} and grammars.cached == 2


def test_what_no_request_holds_leaves_the_cache_by_number_and_by_bytes():
    grammars = Grammars(Backend(), most=3, most_bytes=10)
    a, b, c, large, larger = specs("a", "b", "c", 8 * "l", 11 * "l")
    for one in (a, b, c, a, large):  # `a` is used once more
        grammars.get(one, "")
    assert [grammars.find(one, "") is not None for one in (a, b, c, large)] == [True, False, True, True]
    grammars.get(larger, "")
    assert grammars.cached == 0 and grammars.cached_bytes == 0 and not grammars._held


def test_a_tenant_finds_only_what_was_compiled_for_it():
    """Else the time of its first token would tell that another one has used the same grammar, held or cached."""
    backend = Backend()
    grammars, (cached, held) = Grammars(backend, most=1), specs("a", "b")
    grammars.get(cached, "mine")
    assert grammars.find(cached, "mine") is not None and grammars.find(cached, "probing") is None
    used = grammars.get(held, "mine")
    assert grammars.get(held, "mine") is used and grammars.get(held, "probing") is not used
    assert backend.compiled == {"a": 1, "b": 2}


@pytest.mark.parametrize(("most", "most_bytes"), [(3, 1000), (1000, 30)], ids=["number", "bytes"])
def test_a_tenants_flood_displaces_its_own_grammars(most, most_bytes):
    grammars = Grammars(Backend(), most=most, most_bytes=most_bytes)
    quiet, flood = specs("q" * 10), specs(*(f"flood {n:04}" for n in range(20)))
    grammars.get(quiet[0], "quiet")
    for one in flood:
        grammars.get(one, "flood")
    grammars._cached.check_integrity()
    assert grammars.find(quiet[0], "quiet") is not None and grammars.cached == 3
    assert [grammars.find(one, "flood") is not None for one in flood] == 18 * [False] + 2 * [True]


def object_of(count: int, member: str) -> str:
    members = ",".join(f'"field_{i}":{member}' for i in range(count))
    return f'{{"type":"object","properties":{{{members}}}}}'


def list_of(count: int, item: str) -> str:
    return f'{{"type":"array","prefixItems":[{",".join(count * [item])}]}}'


@pytest.mark.parametrize(
    ("text", "kib"),
    [
        (object_of(60, '{"type":"string","maxLength":40}'), 265),
        (object_of(60, '{"type":"number","minimum":-1.5,"maximum":12345.678}'), 650),
        (list_of(150, '{"type":"integer","minimum":1000000000007919,"maximum":900000000000104729}'), 4719),
        (list_of(150, '{"type":"number","minimum":1110}'), 1207),
        (list_of(150, '{"type":"integer","multipleOf":172,"minimum":0,"maximum":1000000}'), 7100),
        (list_of(150, '{"type":"array","items":{"type":"integer","minimum":75},"maxItems":900}'), 4290),
        (list_of(150, '{"minimum":75}'), 1920),
        (object_of(150, "{}"), 650),
        ('["choice 0",' + ",".join(f'"choice 0 {i}"' for i in range(240)) + "]", 292),
        ("|".join(f"a0[0-9]{{1,{i + 2}}}" for i in range(60)), 33),
    ],
    ids=[
        "texts",
        "numbers",
        "digits",
        "minimum",
        "multiples",
        "lists",
        "any range",
        "any",
        "choice",
        "regex",
    ],
)
def test_estimates_are_of_the_order_of_what_grammars_take(text, kib):
    """`kib`: what a process grew by, on average of 8 or 20 such grammars. A cache of 64 MiB then takes no more than 96."""
    assert kib / 1.5 < estimated_bytes(text) / 1024 < 4 * kib + 64


@pytest.mark.parametrize(("multiple", "kib"), [("9973", 4_805), ("49999", 20_955), ("99.73", 4_805)])
def test_a_multiple_counts_by_its_remainders(multiple, kib):
    """`kib`: what a process grew by; a schema of 45 bytes took 20 MiB and was counted as 0.1."""
    size = estimated_bytes(f'{{"type": "integer", "multipleOf": {multiple}}}') / 1024
    assert kib / 1.5 < size < 1.5 * kib
    assert estimated_bytes('{"multipleOf": ' + "9" * 400 + "}") < 1 << 30


def test_what_matchers_add_counts():
    grammars = Grammars(Backend(), most=3, most_bytes=10)
    a, b = specs("a", "b")
    grown = grammars.get(a, "")
    grammars.get(b, "")
    grown.size_bytes = 10  # type: ignore[misc]
    grammars.find(b, "")
    assert grammars.cached == 1 and grammars.cached_bytes == 1
    assert grammars.find(a, "") is grown, "a request holds it"
    assert grammars.cached_bytes == 10 and grammars.find(b, "") is None


def test_states_of_the_lexer_are_seen(tmp_path):
    """In use, processes grew by 1.2 to 1.9 MiB for 1500 tokens of this expression, and by less than 0.3 of a schema's."""
    write_tokenizer(tmp_path)
    backend, draws = LlguidanceBackend(tmp_path, VOCAB, (2,)), random.Random(1)
    raw = json.loads((tmp_path / "tokenizer.json").read_text())["model"]["vocab"]
    grammar = backend.compile(GrammarSpec("regex", "(a|b)*a(a|b){30}c"))
    words, before, found = all_allowed(VOCAB), grammar.size_bytes, []
    for _ in range(3):  # further matchers go on where the first one was
        matcher = grammar.matcher()
        matcher.fill(words)
        for _ in range(512):
            matcher.accept([raw[draws.choice("ab")]])
            matcher.fill(words)
        found.append((grammar.size_bytes - before) / (1 << 20))
    assert 0.4 < found[0] < found[1] < found[2] and 1.2 < found[2] < 5.0
    schema = backend.compile(GrammarSpec("json_schema", '{"type":"array","items":{"type":"integer"}}'))
    matcher, before = schema.matcher(), schema.size_bytes
    matcher.accept([raw["["]])
    for _ in range(600):
        matcher.fill(words)
        matcher.accept([raw["1"], raw[","]])
    assert schema.size_bytes - before < 128 << 10
