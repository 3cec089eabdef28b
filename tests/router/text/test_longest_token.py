"""The longest text that one token stands for, per kind of tokenizer."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers

from router.text.longest_token import most_bytes
from tests.router.text.small_tokenizers import byte_level

DEMO = Path(__file__).resolve().parents[3] / "demo" / "model"


def byte_fallback(*pieces: str) -> Tokenizer:
    vocab = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a", *pieces]
    made = Tokenizer(
        models.BPE(
            vocab={piece: i for i, piece in enumerate(vocab)},
            merges=[("▁", "a")] if "▁a" in pieces else [],
            unk_token="<unk>",
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    return made


def with_part(made: Tokenizer, **parts: Any) -> Tokenizer:
    for name, part in parts.items():
        setattr(made, name, part)
    return made


KNOWN = {
    "demo": lambda: Tokenizer.from_file(str(DEMO / "tokenizer.json")),
    "bytes": byte_level,
    "merged": lambda: byte_level(("a", "a"), ("aa", "aa"), ("Ġ", "a")),
    "composed": lambda: with_part(byte_level(("Î", "Ĳ")), normalizer=normalizers.NFC()),
    "fallback": lambda: byte_fallback("▁a"),
}


@cache
def known(name: str) -> Tokenizer:
    """Made once: the demo model's takes 20 ms to read."""
    return KNOWN[name]()


@pytest.mark.parametrize("name", KNOWN)
@settings(max_examples=300, deadline=None)
@given(text=st.text(max_size=30) | st.text("a \u0390\u1fbe\u0308\u0301\u1fef\U0001f600", max_size=30))
def test_no_token_stands_for_more_bytes_than_the_bound(name, text):
    tokenizer = known(name)
    most = most_bytes(tokenizer)
    assert most is not None
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    assert len(text.encode()) <= most * len(ids)


def test_the_bound_is_the_longest_token():
    assert most_bytes(byte_level()) == 1
    assert most_bytes(byte_level(("a", "a"), ("aa", "aa"))) == 4
    made = byte_level()
    made.add_special_tokens(["<|é|>"])
    assert most_bytes(made) == 6
    assert most_bytes(byte_fallback("▁a")) == 6


def words() -> Tokenizer:
    return with_part(
        Tokenizer(models.WordLevel({"[UNK]": 0}, unk_token="[UNK]")),
        pre_tokenizer=pre_tokenizers.WhitespaceSplit(),
    )


def swallowing() -> Tokenizer:
    made = byte_level()
    made.add_tokens([AddedToken("<m>", lstrip=True)])
    return made


def truncating() -> Tokenizer:
    made = byte_level()
    made.enable_truncation(4)
    return made


UNBOUNDED = {
    "a word each": words,
    "swallows white space": swallowing,
    "cuts": truncating,
    "strips": lambda: with_part(byte_level(), normalizer=normalizers.Strip()),
    "drops": lambda: with_part(byte_level(), normalizer=normalizers.Replace("xx", "")),
    "leaves out what is between": lambda: with_part(
        byte_level(),
        pre_tokenizer=pre_tokenizers.Sequence(
            [pre_tokenizers.Split(" ", "removed"), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        ),
    ),
    "one token for all unknown text": lambda: Tokenizer(
        models.BPE(vocab={"<unk>": 0, "a": 1}, merges=[], unk_token="<unk>", fuse_unk=True)
    ),
}


@pytest.mark.parametrize("name", UNBOUNDED)
def test_others_have_no_bound(name):
    assert most_bytes(UNBOUNDED[name]()) is None
