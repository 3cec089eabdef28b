"""Which certificates are not taken up in place of one that is in use: those that peers would refuse at once."""

from __future__ import annotations

import datetime
import time
from typing import TYPE_CHECKING

from cluster.errors import ConfigError
from cluster.security.peer_names import ROUTER_NAME, WORKER_NAME

if TYPE_CHECKING:
    from cryptography import x509


def check_replacement(new: bytes, used: bytes) -> None:
    """Raise ConfigError for a certificate that is not valid now, or is another role's, while the used one is valid."""
    from cryptography import x509  # here: `make gpu-check` does without the package

    try:
        before, after = (x509.load_pem_x509_certificate(pem) for pem in (used, new))
        lost = _roles(before) - _roles(after)
    except ValueError:  # OpenSSL has read what `cryptography` refuses
        return
    if not _is_valid(before):
        return
    if not _is_valid(after):
        begins, ends = after.not_valid_before_utc, after.not_valid_after_utc
        raise ConfigError(f"the new certificate is valid from {begins} to {ends} only", field="tls_cert")
    if lost:
        raise ConfigError(
            f"the new certificate lacks the name {', '.join(sorted(lost))} of the previous one",
            field="tls_cert",
        )


def _is_valid(certificate: x509.Certificate) -> bool:
    now = datetime.datetime.fromtimestamp(time.time(), datetime.UTC)
    return certificate.not_valid_before_utc <= now <= certificate.not_valid_after_utc


def _roles(certificate: x509.Certificate) -> set[str]:
    from cryptography import x509

    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return set()
    return {ROUTER_NAME, WORKER_NAME}.intersection(names.get_values_for_type(x509.DNSName))
