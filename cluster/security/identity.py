"""A process's certificate, read again when its files change."""

from __future__ import annotations

import contextlib
import logging
import os
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from cluster.errors import ConfigError
from cluster.security.replacement import check_replacement

log = logging.getLogger(__name__)
CHECK_SECONDS = 1.0


@dataclass(frozen=True)
class Pem:
    """Contents of the PEM files. `ca` is empty where peers need no certificate."""

    cert: bytes
    key: bytes
    ca: bytes


class Identity:
    """A certificate, its key and the accepted authority, from the newest readable files.

    Raises ConfigError, which names the file, if they cannot be used at the start. Thread-safe: gRPC calls it from its own
    threads.
    """

    def __init__(self, cert: Path, key: Path, ca: Path | None, clock: Callable[[], float] = time.monotonic):
        self._files = (cert, key, ca)
        self._clock = clock
        self._lock = threading.Lock()
        self._stamp = self._now_stamp()
        self._pem = self._read()
        self._checked = clock()
        self._logged: tuple[object, ...] | None = None  # stamp of the files whose failure was logged last
        self.version = 1

    def current(self) -> Pem:
        """Return the current contents; checks the files at most once a second."""
        with self._lock:
            now = self._clock()
            if now - self._checked >= CHECK_SECONDS:
                self._checked = now
                self._refresh()
            return self._pem

    def load_into(self, context: ssl.SSLContext) -> None:
        """Load certificate, key and authority into a context, which may be in use: those that `current` returns, which are
        not those of the files in the middle of a rotation."""
        _load(self._pem, context, verify=self._files[2] is not None)

    def _refresh(self) -> None:
        stamp = self._now_stamp()
        if stamp == self._stamp:
            return
        try:
            pem = self._read()
            check_replacement(pem.cert, self._pem.cert)
        except ConfigError as error:
            # Perhaps half of a rotation: certificate and key are two files. The next check reads them again.
            if stamp != self._logged:
                self._logged = stamp
                log.warning("%s; the previous certificate stays in use", error.message)
            return
        if stamp == self._now_stamp():
            self._stamp, self._pem = stamp, pem
            self.version += 1
            log.info("loaded the changed certificate %s", self._files[0])

    def _read(self) -> Pem:
        cert, key, ca = self._files
        try:
            pem = Pem(cert.read_bytes(), key.read_bytes(), ca.read_bytes() if ca is not None else b"")
            # OpenSSL refuses here what gRPC would refuse only at each handshake, without a message.
            _load(pem, ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), verify=ca is not None)
        except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
            names = ", ".join(str(file) for file in self._files if file is not None)
            raise ConfigError(f"TLS files {names}: {error}{_advice(error)}", field="tls_cert") from None
        return pem

    def _now_stamp(self) -> tuple[object, ...]:
        return tuple(file_stamp(file) for file in self._files if file is not None)


def _load(pem: Pem, context: ssl.SSLContext, *, verify: bool) -> None:
    """`verify`: there is an authority. Raises OSError or ValueError."""
    with _file_of(pem.cert) as cert, _file_of(pem.key) as key, _file_of(pem.ca) as ca:
        context.load_cert_chain(cert, key, no_password)
        if verify:
            context.load_verify_locations(ca)


@contextlib.contextmanager
def _file_of(content: bytes) -> Iterator[str]:
    """The path of a file that is in memory only: Python loads certificates and keys from files."""
    with open(os.memfd_create("pem"), "wb") as file:
        file.write(content)
        file.flush()
        yield f"/proc/self/fd/{file.fileno()}"


def _advice(error: Exception) -> str:
    """The end of an error's message: advice, and the meaning of OpenSSL's terse errors about files."""
    if isinstance(error, PermissionError):
        return "; this user needs the right to read all of them"
    if not isinstance(error, ssl.SSLError):
        return ""
    if error.reason == "KEY_VALUES_MISMATCH":
        return "; the key is that of another certificate"
    return "; certificate, key and authority are PEM files, each with its own content"


def no_password() -> bytes:
    """Called by OpenSSL for an encrypted key. Raises ValueError: OpenSSL would ask on the terminal, and the process would
    serve nothing until there is an answer."""
    raise ValueError(
        "the key is encrypted; Baton asks for no password: store it without one, readable by its user only"
    )


def file_stamp(file: Path) -> tuple[int, int, int] | None:
    """Identify a file's version; a symbolic link with a new target (a mounted Secret) is another version."""
    try:
        found = os.stat(file)
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns, found.st_size


def make_identity(cert: Path | None, key: Path | None, ca: Path | None) -> Identity | None:
    """Return the configured identity, or None without one. Raises ConfigError if certificate or key is missing."""
    if (cert is None) != (key is None):
        raise ConfigError("tls_cert and tls_key belong together", field="tls_cert" if key else "tls_key")
    return Identity(cert, key, ca) if cert is not None and key is not None else None
