"""Certificates for development, signed by two authorities.

ca         signs router and worker: the cluster's own certificates, and nothing else
client-ca  signs client: certificates of clients, where the routers require them
"""

from __future__ import annotations

import datetime
import ipaddress
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from baton import safe_files
from cluster.errors import ConfigError
from cluster.security.peer_names import ROUTER_NAME, WORKER_NAME

AUTHORITY_DAYS = 3650
# Clocks differ: a certificate made now must be valid on a machine whose clock is behind.
SKEW = datetime.timedelta(minutes=5)
# As resolvers take them: labels of up to 63 characters, the first one may be a wildcard; _ is usual in Compose.
_HOST = re.compile(
    r"(?:\*\.)?(?:[a-z0-9_](?:[a-z0-9_-]{0,61}[a-z0-9_])?\.)*[a-z0-9_](?:[a-z0-9_-]{0,61}[a-z0-9_])?", re.I
)
_CURVE = ec.SECP256R1()


def make_certs(directory: Path, hosts: Sequence[str], days: int) -> list[Path]:
    """Write new certificates, signed by existing authorities if there are any. Raises ConfigError."""
    for host in hosts:
        _check_host(host)
    if os.path.exists(directory) and not os.path.isdir(directory):
        raise ConfigError(f"--out {directory} is a file: name a folder", field="out")
    try:
        directory.mkdir(parents=True, exist_ok=True)
        cluster, clients = _authority(directory / "ca"), _authority(directory / "client-ca")
        both = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
        router_names = [ROUTER_NAME, "localhost", "127.0.0.1", "::1", *hosts]
        _issue(directory / "router", cluster, router_names, both, days)
        _issue(directory / "worker", cluster, [WORKER_NAME], both, days)
        _issue(directory / "client", clients, ["client"], [ExtendedKeyUsageOID.CLIENT_AUTH], days)
    except PermissionError as error:
        raise ConfigError(
            f"--out {directory} cannot be used ({error.strerror}): name a folder in which this user may read and write",
            field="out",
        ) from None
    except OSError as error:
        reason = f"{error.filename or directory}: {error.strerror}"
        raise ConfigError(
            f"--out {directory} cannot be used ({reason}): name another folder", field="out"
        ) from error
    except ValueError as error:
        raise ConfigError(f"{directory}: {error}", field="out") from error
    return sorted(directory.glob("*.pem"))


class _Authority(NamedTuple):
    cert: x509.Certificate
    key: ec.EllipticCurvePrivateKey


def _authority(stem: Path) -> _Authority:
    cert_file, key_file = stem.with_suffix(".pem"), stem.with_suffix(".key")
    if cert_file.exists() and key_file.exists():
        key = serialization.load_pem_private_key(key_file.read_bytes(), None)
        if not isinstance(key, ec.EllipticCurvePrivateKey):
            raise ConfigError(f"{key_file} is not an authority made here", field="out")
        return _Authority(x509.load_pem_x509_certificate(cert_file.read_bytes()), key)
    if cert_file.exists():  # a new authority in its place would be unknown to every certificate in use
        raise ConfigError(
            f"{cert_file} is there, and {key_file.name} is not: put the key beside it to sign with this authority, or "
            f"remove {cert_file.name} for a new one",
            field="out",
        )
    key = ec.generate_private_key(_CURVE)
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"Baton development {stem.name}")])
    cert = (
        _builder(name, name, key.public_key(), AUTHORITY_DAYS)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage(signs_certificates=True), critical=True)
        .sign(key, hashes.SHA256())
    )
    _write(stem, cert, key)
    return _Authority(cert, key)


def _issue(
    stem: Path, authority: _Authority, names: Sequence[str], usages: list[x509.ObjectIdentifier], days: int
) -> None:
    key = ec.generate_private_key(_CURVE)
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"baton-{stem.name}")])
    issuer = x509.AuthorityKeyIdentifier.from_issuer_public_key(authority.key.public_key())
    cert = (
        _builder(name, authority.cert.subject, key.public_key(), days)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(signs_certificates=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage(usages), critical=False)
        .add_extension(x509.SubjectAlternativeName([_name(one) for one in names]), critical=False)
        .add_extension(issuer, critical=False)
        .sign(authority.key, hashes.SHA256())
    )
    _write(stem, cert, key)


def _builder(
    subject: x509.Name, issuer: x509.Name, public: ec.EllipticCurvePublicKey, days: int
) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(public)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - SKEW)
        .not_valid_after(now + datetime.timedelta(days=days))
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(public), critical=False)
    )


def _usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=True,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        encipher_only=False,
        decipher_only=False,
    )


def _check_host(text: str) -> None:
    """Raises ConfigError for a name that no client can look up: its certificate would fit no router."""
    try:
        ipaddress.ip_address(text)
    except ValueError:
        if len(text) > 253 or not _HOST.fullmatch(text):
            shown = text if len(text) <= 60 else f"{text[:60]}…"
            raise ConfigError(
                f"--host {shown!r} is neither the name of a host nor an address", field="host"
            ) from None


def _name(text: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(text))
    except ValueError:
        return x509.DNSName(text)


def _write(stem: Path, cert: x509.Certificate, key: ec.EllipticCurvePrivateKey) -> None:
    """Write each file whole or not at all, the key readable by its owner only."""
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    public = cert.public_bytes(serialization.Encoding.PEM)
    for file, content, mode in (
        (stem.with_suffix(".key"), private, 0o600),
        (stem.with_suffix(".pem"), public, 0o644),
    ):
        safe_files.replace(file, content, mode)
