"""The identities of certificates that `baton certs` made."""

from __future__ import annotations

from pathlib import Path

from baton.client import ClientTls
from cluster.security.identity import Identity, make_identity


def identity(directory: Path, name: str, ca: str = "ca") -> Identity:
    found = make_identity(directory / f"{name}.pem", directory / f"{name}.key", directory / f"{ca}.pem")
    assert found is not None
    return found


def client_tls(directory: Path) -> ClientTls:
    return ClientTls(directory / "ca.pem", directory / "client.pem", directory / "client.key")
