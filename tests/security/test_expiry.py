"""When certificates expire, as the metric shows it."""

from __future__ import annotations

import math
import os
from pathlib import Path

import pytest

from baton.local.certs import make_certs
from cluster.security import expiry
from cluster.security.expiry import seconds_left
from cluster.security.identity import CHECK_SECONDS, Identity

DAY = 86400.0


def identity(folder: Path) -> Identity:
    return Identity(folder / "router.pem", folder / "router.key", folder / "ca.pem", clock=lambda: math.inf)


def days(left: dict[str, float]) -> dict[str, float]:
    return {name: round(seconds / DAY, 1) for name, seconds in left.items()}


def test_each_setting_shows_when_its_certificate_expires(tmp_path: Path) -> None:
    for name, valid in (("one", 3), ("two", 40)):
        make_certs(tmp_path / name, [], valid)
    inside, public = identity(tmp_path / "one"), identity(tmp_path / "two")
    assert days(
        seconds_left((inside, "tls_cert", "tls_ca"), (public, "public_tls_cert", "tls_client_ca"))
    ) == {
        "tls_cert": 3.0,
        "tls_ca": 3650.0,
        "public_tls_cert": 40.0,
        "tls_client_ca": 3650.0,
    }
    assert set(seconds_left((None, "tls_cert", "tls_ca")).values()) == {math.inf}


def test_a_renewed_certificate_counts_from_the_time_that_it_is_used(tmp_path: Path) -> None:
    for name, valid in (("old", 3), ("new", 90)):
        make_certs(tmp_path / name, [], valid)
    now = 0.0
    files = [tmp_path / "old" / name for name in ("router.pem", "router.key", "ca.pem")]
    used = Identity(files[0], files[1], files[2], clock=lambda: now)
    for file in files:
        os.replace(tmp_path / "new" / file.name, file)
    assert days(seconds_left((used, "tls_cert", "tls_ca")))["tls_cert"] == 3.0
    now += CHECK_SECONDS
    assert days(seconds_left((used, "tls_cert", "tls_ca")))["tls_cert"] == 90.0


def test_a_chain_ends_with_its_first_certificate_and_authorities_with_their_last(tmp_path: Path) -> None:
    for name, valid in (("one", 3), ("two", 40)):
        make_certs(tmp_path / name, [], valid)
    both = b"".join((tmp_path / name / "router.pem").read_bytes() for name in ("two", "one"))
    first, last = expiry._ends(both, min), expiry._ends(both, max)
    assert round((last - first) / DAY) == 37
    assert expiry._ends(b"-----BEGIN CERTIFICATE-----\nAA==\n-----END CERTIFICATE-----\n", min) == math.inf


@pytest.mark.parametrize("content", [b"", b"not a certificate"])
def test_certificates_that_cannot_be_read_do_not_fail_a_scrape(content: bytes) -> None:
    assert expiry._ends(content, max) == math.inf
