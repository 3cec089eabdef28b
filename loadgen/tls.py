"""TLS of a load's clients: the authorities that they trust, and the certificate that they show."""

from __future__ import annotations

import ssl

from loadgen.config import LoadConfig


def make_context(config: LoadConfig) -> ssl.SSLContext:
    """Raises OSError for a file that cannot be read, or a key that is not the certificate's."""
    context = ssl.create_default_context(cafile=config.tls_ca)
    if config.tls_cert is not None:
        # Without a password OpenSSL would ask for one at the terminal.
        context.load_cert_chain(config.tls_cert, config.tls_key, password="")
    return context
