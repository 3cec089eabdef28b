"""Sizes as people write them on the command line."""

from __future__ import annotations

import pytest

from baton.cli.sizes import parse_bytes
from cluster.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("1000000", 10**6),
        ("512MiB", 512 << 20),
        ("2gib", 2 << 30),
        ("1.5 TiB", 3 << 39),
        ("2TB", 2 * 10**12),
        ("7 b", 7),
    ],
)
def test_a_size_is_read_with_its_unit(text, size):
    assert parse_bytes(text, "kv_memory") == size


@pytest.mark.parametrize("text", ["", "GiB", "1 PiB", "1 tit", "much", "inf", "nan"])
def test_an_invalid_size_is_refused_and_names_its_flag(text):
    with pytest.raises(ConfigError, match=r"--kv-memory .* is not a size") as refused:
        parse_bytes(text, "kv_memory")
    assert refused.value.field == "kv_memory"
