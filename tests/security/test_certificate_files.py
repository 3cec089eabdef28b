"""Files of certificates, keys and authorities: which are refused, and which replace others while a process serves."""

from __future__ import annotations

import datetime
import shutil
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from baton.local.certs import make_certs
from cluster.errors import ConfigError
from cluster.security.identity import Identity, make_identity
from cluster.security.peer_names import ROUTER_NAME, WORKER_NAME
from cluster.security.tls import ListenerContext, Peers
from tests.security.identities import client_tls, identity


def test_half_a_rotation_changes_nothing(certs, tmp_path):
    live = tmp_path / "live"
    shutil.copytree(certs / "ours", live)
    now = 0.0
    one = Identity(live / "worker.pem", live / "worker.key", live / "ca.pem", clock=lambda: now)
    first = one.current()
    make_certs(live, [], 30)
    for name, other in (("worker.key", "theirs"), ("ca.pem", "")):
        original = (live / name).read_bytes()
        if other:
            shutil.copy(certs / other / name, live / name)
        else:
            (live / name).write_text("not a certificate")
        now += 10
        assert one.current() == first and one.version == 1
        (live / name).write_bytes(original)
    now += 10
    assert one.current() != first and one.version == 2


def test_a_pair_that_does_not_match_is_logged_once(certs, tmp_path, caplog):
    live = tmp_path / "live"
    shutil.copytree(certs / "ours", live)
    now = 0.0
    one = Identity(live / "worker.pem", live / "worker.key", live / "ca.pem", clock=lambda: now)
    for lines in (1, 2):
        (live / "worker.key").write_text("no key" * lines)
        for _ in range(60):
            now += 1
            one.current()
        assert len([record for record in caplog.records if "worker.key" in record.getMessage()]) == lines


def test_an_encrypted_key_is_refused_without_a_question(certs, tmp_path):
    """OpenSSL asked for its password on the terminal, also of a process that was serving."""
    live = tmp_path / "live"
    shutil.copytree(certs / "ours", live)
    for name in ("worker", "client"):
        file = live / f"{name}.key"
        key = serialization.load_pem_private_key(file.read_bytes(), None)
        password = serialization.BestAvailableEncryption(b"secret")
        file.write_bytes(
            key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, password)
        )
    with pytest.raises(ConfigError, match="the key is encrypted; Baton asks for no password"):
        identity(live, "worker")
    with pytest.raises(ConfigError, match="the key is encrypted; Baton asks for no password"):
        client_tls(live).credentials()


def _issued(live: Path, stem: str, name: str, days: tuple[float, float]) -> None:
    """A certificate of the cluster's authority, valid between two days from now."""
    authority = x509.load_pem_x509_certificate((live / "ca.pem").read_bytes())
    signer: Any = serialization.load_pem_private_key((live / "ca.key").read_bytes(), None)
    key, now = ec.generate_private_key(ec.SECP256R1()), datetime.datetime.now(datetime.UTC)
    begins, ends = (now + datetime.timedelta(days=one) for one in days)
    subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "x")])
    certificate = (
        x509.CertificateBuilder(authority.subject, subject, key.public_key(), x509.random_serial_number())
        .not_valid_before(begins)
        .not_valid_after(ends)
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(name)]), critical=False)
        .sign(signer, hashes.SHA256())
    )
    pem = serialization.Encoding.PEM
    private = key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    (live / f"{stem}.key").write_bytes(private)
    (live / f"{stem}.pem").write_bytes(certificate.public_bytes(pem))


@pytest.mark.parametrize(
    ("name", "days", "fault"),
    [
        (WORKER_NAME, (-9, -1), "is valid from"),
        (WORKER_NAME, (1, 9), "is valid from"),
        (ROUTER_NAME, (-1, 9), "lacks the name worker.baton.internal"),
        (WORKER_NAME, (-1, 9), ""),
    ],
)
def test_a_certificate_that_peers_would_refuse_replaces_no_valid_one(
    certs, tmp_path, caplog, name, days, fault
):
    """It was taken up, and no request was served until it was replaced again."""
    live, now = tmp_path / "live", 0.0
    shutil.copytree(certs / "ours", live)
    one = Identity(live / "worker.pem", live / "worker.key", live / "ca.pem", clock=lambda: now)
    first = one.current()
    _issued(live, "worker", name, days)
    for _ in range(3):
        now += 10
        assert (one.current() == first) == bool(fault)
    warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert len(warnings) == bool(fault) and all(fault in text for text in warnings)
    shutil.copy(certs / "ours" / "worker.key", live)
    shutil.copy(certs / "ours" / "worker.pem", live)
    now += 10
    assert one.current() == first


def test_any_certificate_replaces_one_that_has_expired(certs, tmp_path):
    live, now = tmp_path / "live", 0.0
    shutil.copytree(certs / "ours", live)
    _issued(live, "worker", WORKER_NAME, (-9, -1))
    one = Identity(live / "worker.pem", live / "worker.key", live / "ca.pem", clock=lambda: now)
    _issued(live, "worker", ROUTER_NAME, (-9, -2))
    now += 10
    one.current()
    assert one.version == 2


def test_contexts_are_made_in_the_middle_of_a_rotation(certs, tmp_path):
    """A router that had no link yet could open none; one whose files were then those of another role, a false one."""
    live = tmp_path / "live"
    shutil.copytree(certs / "ours", live)
    one = identity(live, "router")
    for name in ("router.key", "ca.pem"):
        (live / name).write_text("half")
    assert Peers(one).link_context() is not None
    ListenerContext(one, ask_clients=True)
    shutil.rmtree(live)
    assert Peers(one).link_context() is not None


def test_an_empty_authority_is_refused(certs, tmp_path):
    live = tmp_path / "live"
    shutil.copytree(certs / "ours", live)
    (live / "ca.pem").write_text("")
    with pytest.raises(ConfigError, match=r"ca\.pem"):
        identity(live, "router")


def test_configuration_by_halves_is_refused(certs, tmp_path):
    ours = certs / "ours"
    with pytest.raises(ConfigError):
        make_identity(ours / "worker.pem", None, None)
    with pytest.raises(ConfigError, match=r"nothing\.pem"):
        make_identity(tmp_path / "nothing.pem", ours / "worker.key", None)
    with pytest.raises(ConfigError):
        make_identity(ours / "worker.pem", ours / "router.key", None)


def test_keys_are_for_their_owner_only(certs):
    for file in (certs / "ours").glob("*.key"):
        assert file.stat().st_mode & 0o077 == 0
