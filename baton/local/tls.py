"""The TLS settings of the processes of `baton up`."""

from __future__ import annotations

from pathlib import Path

from cluster.security.identity import make_identity
from cluster.security.tls import ClientTls, Peers


class LocalTls:
    """Files of `baton certs` in one directory; without a directory everything is plain text."""

    def __init__(self, directory: Path | None, require_client_certs: bool):
        self._directory = directory.absolute() if directory is not None else None
        self._require = require_client_certs

    def worker(self) -> dict[str, Path]:
        return self._own("worker")

    def router(self) -> dict[str, Path]:
        fields = self._own("router")
        if self._directory is not None and self._require:
            fields["tls_client_ca"] = self._directory / "client-ca.pem"
        return fields

    def peers(self) -> Peers:
        """Channels to workers, with a router's certificate."""
        own = self._own("router")
        return Peers(make_identity(own.get("tls_cert"), own.get("tls_key"), own.get("tls_ca")))

    def client(self) -> ClientTls | None:
        """TLS settings for requests of `baton up` to the routers' public ports."""
        if self._directory is None:
            return None
        cert, key = self._directory / "client.pem", self._directory / "client.key"
        own = (cert, key) if self._require else (None, None)
        return ClientTls(self._directory / "ca.pem", *own)

    def _own(self, name: str) -> dict[str, Path]:
        if self._directory is None:
            return {}
        return {
            "tls_cert": self._directory / f"{name}.pem",
            "tls_key": self._directory / f"{name}.key",
            "tls_ca": self._directory / "ca.pem",
        }
