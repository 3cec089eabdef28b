"""Block hashes against their definition, which must not change: other processes and older workers compute the same."""

from __future__ import annotations

import hashlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.protocol.block_hash import (
    hash_block,
    hash_blocks,
    index_keys,
    make_salt,
    pack_tokens,
    unpack_tokens,
)

SECRET, SALT = b"deployment", bytes(range(16))


def test_no_two_triples_share_a_salt_by_where_their_parts_meet() -> None:
    """Otherwise a tenant named like the end of an adapter's name would find that adapter's prefixes."""
    triples = [
        ("ab", "c", ""),
        ("a", "bc", ""),
        ("", "abc", ""),
        ("a", "b", "c"),
        ("abc", "", ""),
        ("", "", "abc"),
    ]
    assert len({make_salt(*triple) for triple in triples}) == len(triples)


parts = st.text("ab\0\1", max_size=3)


@given(one=st.tuples(parts, parts, parts), other=st.tuples(parts, parts, parts))
def test_a_salt_is_that_of_one_triple(one: tuple[str, str, str], other: tuple[str, str, str]) -> None:
    assert (make_salt(*one) == make_salt(*other)) == (one == other)


@pytest.mark.parametrize(
    ("triple", "golden"),
    [
        (("m", "", ""), "acfb76b4bb5ec7aef29f22c22412808d"),
        (("model-0123456789abcdef", "adapter", "tenant"), "fc8e42eb6b626097e758c5431cdb8bb1"),
        (("mödel", "", "a" * 300), "c1b08f948d01edf86a0487733a0e94f9"),
    ],
)
def test_salts_equal_golden_values(triple: tuple[str, str, str], golden: str) -> None:
    written = b"".join(len(part.encode()).to_bytes(4, "little") + part.encode() for part in triple)
    assert make_salt(*triple) == hashlib.blake2b(written, digest_size=16).digest()
    assert make_salt(*triple).hex() == golden


def test_hashes_equal_golden_values() -> None:
    tokens = [1, 2, 3, 70_000, 5, 6, 7, 8, 9]
    raw = b"".join(token.to_bytes(4, "little") for token in tokens)
    first = hashlib.blake2b(bytes(16) + raw[:16] + SALT, digest_size=16, key=SECRET).digest()
    second = hashlib.blake2b(first + raw[16:32] + SALT, digest_size=16, key=SECRET).digest()
    assert hash_blocks(pack_tokens(tokens), 4, secret=SECRET, salt=SALT) == [first, second]
    assert first.hex() == "fe5b82e7bec6a16af3ea9c63fa8cc55e"
    assert second.hex() == "1e3e3c0c7c9791a2381760a201f7f19f"


@given(tokens=st.lists(st.integers(0, 2**32 - 1), max_size=20), page=st.integers(1, 5))
def test_one_block_at_a_time_gives_the_same(tokens: list[int], page: int) -> None:
    packed = pack_tokens(tokens)
    assert unpack_tokens(packed) == tokens
    whole = hash_blocks(packed, page, secret=SECRET, salt=SALT)
    parent, single = None, []
    for begin in range(0, len(tokens) // page * page, page):
        parent = hash_block(parent, pack_tokens(tokens[begin : begin + page]), secret=SECRET, salt=SALT)
        single.append(parent)
    assert whole == single
    assert index_keys(whole) == b"".join(one[:8] for one in whole)


def test_every_input_changes_the_hash() -> None:
    block, other = pack_tokens([1, 2]), pack_tokens([2, 1])
    base = hash_block(None, block, secret=SECRET, salt=SALT)
    assert base != hash_block(None, other, secret=SECRET, salt=SALT)
    assert base != hash_block(base, block, secret=SECRET, salt=SALT)
    assert base != hash_block(None, block, secret=b"another", salt=SALT)
    assert base != hash_block(None, block, secret=SECRET, salt=SALT[::-1])
