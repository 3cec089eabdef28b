"""A body is bounded in bytes, depth and elements before it is parsed."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import sys
from types import SimpleNamespace
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.requests import Request

from cluster.config.router import RequestLimits
from cluster.errors import (
    DrainingError,
    InvalidRequestError,
    RequestTooLargeError,
)
from router.admission.admission import ByteBudget
from router.admission.low_priority import LowPriority
from router.frontends.http.connection.body import read_json
from router.frontends.http.openai import generate
from router.frontends.http.serving import Serving
from router.request.json_scan import SCAN_BYTES, JsonScan
from tests.router.counting_gateway import counting_gateway

ANY = 1 << 30


def received(
    left: list[bytes], depth: int = ANY, elements: int = ANY, size: int = 1 << 24, coding: bytes = b""
) -> dict[str, Any]:
    """A body that arrives in these pieces; those that were not read stay in the list."""

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": left.pop(0), "more_body": bool(left)}

    held = ByteBudget(ANY, ANY, lambda tenant: None).hold("")
    most = {"max_body_bytes": size, "max_json_depth": depth, "max_json_elements": elements}
    limits = RequestLimits().model_copy(update=most)
    scope = {"type": "http", "headers": [(b"content-encoding", coding)]}
    return asyncio.run(read_json(Request(scope, receive), limits, held, LowPriority()))


def pieces_of(raw: bytes, size: int) -> list[bytes]:
    return [raw[at : at + size] for at in range(0, len(raw), size)]


def body(value: Any, depth: int = ANY, elements: int = ANY) -> dict[str, Any]:
    return received([orjson.dumps(value)], depth, elements)


def test_a_long_piece_is_scanned_in_several_steps(monkeypatch):
    """Each is a turn of the event loop for others."""
    lengths, read = list[int](), JsonScan.read

    def noted(scan: JsonScan, piece: bytes | bytearray) -> None:
        lengths.append(len(piece))
        read(scan, piece)

    monkeypatch.setattr(JsonScan, "read", noted)
    raw = orjson.dumps({"a": 5 * SCAN_BYTES * "x"})
    assert received([raw]) == orjson.loads(raw)
    assert sum(lengths) == len(raw) and max(lengths) == SCAN_BYTES and len(lengths) == 6


VALUES = st.recursive(
    st.integers(0, 9) | st.sampled_from([0.5, 1e-320, True, None]) | st.text('[{]}",:\\.e', max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("ab", max_size=1), inner, max_size=3),
    max_leaves=20,
)
OBJECTS = st.dictionaries(st.text("ab", max_size=1), VALUES, max_size=3)


def inner_of(one: Any) -> list[Any]:
    return list(one.values()) if isinstance(one, dict) else one if isinstance(one, list) else []


def deep(one: Any) -> int:
    return int(isinstance(one, list | dict)) + max(map(deep, inner_of(one)), default=0)


def cost(one: Any) -> int:
    inner = inner_of(one)
    members = 16 * len(inner) if isinstance(one, dict) else 0
    own = 16 * isinstance(one, list | dict) + members + max(0, len(inner) - 1)
    own += 8 * isinstance(one, str | float | bool)
    return own + sum(map(cost, inner))


@given(value=OBJECTS, limit=st.integers(1, 6))
def test_a_body_nests_as_deep_as_it_may_and_no_deeper(value, limit):
    if deep(value) <= limit:
        assert body(value, limit) == value
    else:
        with pytest.raises(InvalidRequestError, match="nested deeper"):
            body(value, limit)


@given(value=OBJECTS, change=st.integers(-1, 1))
def test_a_body_has_as_many_elements_as_it_may_and_no_more(value, change):
    limit = cost(value) + change
    if change >= 0:
        assert body(value, elements=limit) == value
    else:
        with pytest.raises(InvalidRequestError, match="elements") as caught:
            body(value, elements=limit)
        assert (caught.value.field, caught.value.limit) == ("body", str(limit))


@given(value=OBJECTS, cuts=st.lists(st.integers(0, 60), max_size=4))
def test_pieces_are_counted_as_the_whole(value, cuts):
    raw = orjson.dumps(value)
    scan, begins = JsonScan(), 0
    for end in [*sorted(cuts), len(raw)]:
        scan.read(raw[begins:end])
        begins = max(begins, end)
    assert (scan.depth, scan.elements) == (deep(value), cost(value))
    assert scan.seen == len(raw)


@pytest.mark.parametrize(
    "one", [b'"\xc3\xa9a"', b"1e-320", b"1.5", b"true", b'{"":1}', b"[]", b"9999", b"{}"], ids=bytes.decode
)
def test_no_body_within_the_limits_takes_the_parser_long(one, monkeypatch):
    """A million texts were counted as a million numbers: 0.1 s of the event loop, as often as a client asked. Counted are
    the objects that are made of the largest body, what is called, and the bytes that are scanned: no times."""
    most = RequestLimits().max_json_elements
    scan, scanned, calls = JsonScan(), 0, 0
    scan.read(b"[" + one + b"," + one + b"]")
    of_two, scan = scan.elements, JsonScan()
    scan.read(b"[" + one + b"]")
    count = (most - 100) // (of_two - scan.elements)
    real = JsonScan.read

    def counted(self: JsonScan, piece: bytes | bytearray) -> None:
        nonlocal scanned
        scanned += len(piece)
        real(self, piece)

    def count_calls(frame: Any, event: str, argument: Any) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    monkeypatch.setattr(JsonScan, "read", counted)
    raw = b'{"x":[' + one + (b"," + one) * (count - 1) + b"]}"
    size, pieces, before = len(raw), [raw], sys.getallocatedblocks()
    sys.setprofile(count_calls)
    try:
        made = received(pieces, 8, most, size)
    finally:
        sys.setprofile(None)
    objects = sys.getallocatedblocks() - before
    assert len(made["x"]) == count and scanned == size
    # One object for each element that counts as 8 or more; numbers of the list's own cost are one by one
    assert objects < most / (1 if one == b"9999" else 8) + 1000
    assert calls < 12_000, "some for each 64 KiB, none for each element"


@pytest.mark.parametrize(
    ("raw", "field"),
    [
        (b'{"messages": [{"a": "\xc3\xa9]\\\\\\""}, {"content": [[], {"input": {"x": [1, -1e400]}}]}]}',
         "messages[1].content[1].input.x[1]"),
        (b'{"a": {}, "b": [[1], {"c": 1}], "temperature": 1' + b"0" * 400 + b"}", "temperature"),
        (b'{"x": {"a": 1, "b": 2, "a": 1e400}}', "body"),  # twice: the dict has it at the first one's place
        (b'{"' + b"x" * 5000 + b'": 1e400}', "x" * 200),
    ],
)  # fmt: skip
def test_a_number_larger_than_the_parsers_is_named(raw, field):
    """It is valid JSON."""
    with pytest.raises(InvalidRequestError, match=r"a number above 1\.8e\+308") as caught:
        received([raw])
    assert caught.value.field == field


@pytest.mark.parametrize("raw", [b"1e400", b" -1e400", b"[1e400]"])
def test_a_body_that_is_such_a_number_is_named(raw):
    with pytest.raises(InvalidRequestError, match="a number above") as caught:
        received([raw])
    assert caught.value.field in ("body", "[0]")


@pytest.mark.parametrize(
    "raw",
    [
        b'{"a": 1 1e400}',
        b"{} 1e400",
        b"[1 1e400]",
        b'{"a" 1e400}',
        b"{1e400: 1}",
        b'{"a": 1, 1e400}',
        b'"1e400',
    ],
)
def test_such_a_number_where_none_may_be_is_no_json(raw):
    with pytest.raises(InvalidRequestError, match="not valid JSON"):
        received([raw])


@pytest.mark.parametrize("one", [[], {}, [[1]], "["])
def test_wide_bodies_are_not_walked_over(one):
    """A message may hold many lists, and the loop serves others meanwhile."""
    calls = 0

    def count(frame: Any, event: str, argument: Any) -> None:
        nonlocal calls
        calls += event == "call"

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        body({"x": 20_000 * [one]}, 8)
    finally:
        sys.setprofile(before)
    assert calls < 5_000


def test_too_much_is_refused_before_all_of_it_has_come():
    """And before the parser sees any of it: this body is no valid JSON."""
    for piece in (b"[", b"{", b"[],", b'"":', b"1,"):
        left = pieces_of((1 << 22) // len(piece) * piece, 1 << 16)
        with pytest.raises(InvalidRequestError, match=r"nested|elements"):
            received(left, 32, 1 << 20)
        assert len(left) > 20


def test_large_bodies_within_the_limits_are_read():
    value = {"a": 200_000 * [1], "b": '["\\' * 200_000, "c": {str(i): [i] for i in range(10_000)}}
    assert received(pieces_of(orjson.dumps(value), 70_001), 3, 1 << 20) == value


def test_a_body_has_as_many_bytes_as_it_may_and_no_more():
    raw = orjson.dumps({"a": "b" * 100})
    assert received(pieces_of(raw, 10), size=len(raw)) == {"a": "b" * 100}
    left = pieces_of(raw + 100 * b" ", 10)
    with pytest.raises(RequestTooLargeError):
        received(left, size=len(raw) - 1)
    assert len(left) > 5, "nor is the rest read"


async def test_the_refusal_of_a_draining_router_comes_after_the_body():
    """It closes the connection, which would be reset under the answer if bytes were unread."""
    gateway = counting_gateway()
    left = [b"x" * 1000] * 5

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": left.pop(), "more_body": bool(left)}

    @contextlib.contextmanager
    def admit(caller: Any, connection: str) -> Any:
        raise DrainingError("this router is leaving")
        yield

    gateway.admission = SimpleNamespace(admit=admit)
    gateway.low_priority = LowPriority()
    request: Any = Request({"type": "http", "headers": []}, receive)
    with pytest.raises(DrainingError):
        await generate.Generate(Serving(gateway)).completion(request)
    assert not left


def test_a_body_that_is_compressed_is_refused_with_the_reason():
    """It was called JSON with surrogates."""
    compressed = gzip.compress(b"{}")
    with pytest.raises(
        InvalidRequestError, match="'gzip' is not supported; send the body as plain"
    ) as refused:
        received([compressed], coding=b"gzip")
    assert refused.value.field == "content-encoding"
    for coding in (b"", b"Identity"):
        with pytest.raises(InvalidRequestError, match="not valid JSON"):
            received([compressed], coding=coding)
        assert received([b"{}"], coding=coding) == {}
