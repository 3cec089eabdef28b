"""The time until certificates expire. Then peers refuse each other; no call fails before that."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from functools import lru_cache

from cluster.security.identity import Identity


def seconds_left(*shown: tuple[Identity | None, str, str]) -> dict[str, float]:
    """Seconds until certificates and authorities expire, by setting; infinite without TLS.

    `shown`: identities, each with the settings that name its certificate and its authority."""
    left = {"tls_cert": math.inf, "tls_ca": math.inf}
    for identity, cert, ca in shown:
        if identity is not None:
            pem, now = identity.current(), time.time()
            # A chain is valid while all of it is; in a rotation an authority stands beside its successor.
            left[cert] = _ends(pem.cert, min) - now
            if pem.ca:
                left[ca] = _ends(pem.ca, max) - now
    return left


@lru_cache(maxsize=8)
def _ends(pem: bytes, which: Callable[[Iterable[float]], float]) -> float:
    """The first or the last end (`which`: min or max) of these certificates, in seconds since 1970; infinite if
    `cryptography` refuses what OpenSSL has read."""
    from cryptography import x509  # here: `make gpu-check` does without the package

    try:
        return which(one.not_valid_after_utc.timestamp() for one in x509.load_pem_x509_certificates(pem))
    except ValueError:
        return math.inf
