"""Downloads single files of a repository of the Hugging Face Hub. The Hub provides a SHA-256 for every large file and a
git hash for every small one; an existing file with the right hash is not downloaded again, and the rest of an incomplete
one only."""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx

from baton import safe_files
from baton.download.limits import DownloadLimits
from baton.download.listing import CHUNK_BYTES, HubFile, Repository, read_listing
from baton.download.report import DownloadReport
from cluster.addresses import is_loopback
from cluster.errors import ConfigError, ModelError, UnavailableError

MAX_DESCRIPTION_BYTES = 32 << 20
TRIES = 4
PAUSE_SECONDS = 1.0
CONNECT_SECONDS = 10.0


class Hub:
    """Reads one repository, by several threads, as long as it makes progress. Raises ConfigError, UnavailableError,
    DeadlineError, ModelError."""

    def __init__(
        self,
        endpoint: str,
        repository: Repository,
        token: str,
        limits: DownloadLimits,
        report: DownloadReport,
    ):
        self._endpoint = endpoint.rstrip("/")
        url = _parsed(endpoint)
        # A token to this machine does not cross a network.
        if token and url.scheme != "https" and not is_loopback(url.host):
            raise ConfigError(
                f"--endpoint {endpoint}: HF_TOKEN is sent over https only; name an https endpoint or unset HF_TOKEN",
                field="endpoint",
            )
        self._repository = repository
        self._limits, self._report = limits, report
        # Not compressed: few bytes must not expand beyond the announced size.
        headers = {"accept-encoding": "identity"}
        headers |= {"authorization": f"Bearer {token}"} if token else {}
        # httpx drops the Hub's token when a download is redirected to another host.
        timeout = httpx.Timeout(60.0, connect=CONNECT_SECONDS)
        self._http = httpx.Client(headers=headers, follow_redirects=True, timeout=timeout)
        # httpx limits the time of single reads only; an occasional byte would prolong the download for ever.
        self._lock = threading.Lock()
        self._sockets: list[socket.socket] = []
        self._has_ended = False
        self._watch = threading.Thread(target=self._hang_up_at_the_end, daemon=True)
        self._watch.start()

    def close(self) -> None:
        self._limits.stop()
        self._http.close()

    def _hang_up_at_the_end(self) -> None:
        self._limits.wait_for_end()
        with self._lock:
            self._has_ended = True
            for one in self._sockets:
                _shut_down(one)

    def _get(self, url: str, **headers: str) -> contextlib.AbstractContextManager[httpx.Response]:
        return self._http.stream("GET", url, headers=headers, extensions={"trace": self._connected})

    def _connected(self, event: str, info: dict[str, Any]) -> None:
        # TLS takes over the descriptor of the socket that was connected.
        if event.endswith((".connect_tcp.complete", ".start_tls.complete")):
            with self._lock:
                self._sockets = [one for one in self._sockets if one.fileno() >= 0]
                self._sockets.append(info["return_value"].get_extra_info("socket"))
                if self._has_ended:  # its request fails; an error from here would leave it open
                    _shut_down(self._sockets[-1])

    def list_files(self) -> tuple[str, list[HubFile]]:
        """Return the revision's commit and files."""
        name, revision = self._repository.name, self._repository.revision
        url = f"{self._endpoint}/api/models/{quote(name)}/revision/{quote(revision)}?blobs=true"
        raw = self._retry(lambda: self._read(url))
        try:
            return read_listing(raw)
        except ValueError as error:
            raise UnavailableError(
                f"{self._endpoint} does not describe {name} as the Hub does: {error}", field="endpoint"
            ) from error

    def _read(self, url: str) -> bytes:
        """Read a description of at most MAX_DESCRIPTION_BYTES."""
        raw = bytearray()
        with self._get(url) as answer:
            self._accept(answer)
            for chunk in answer.iter_raw(CHUNK_BYTES):
                raw += chunk
                self._limits.check()
                if len(raw) > MAX_DESCRIPTION_BYTES:
                    raise UnavailableError(
                        f"{url} sends more than {MAX_DESCRIPTION_BYTES} bytes", field="endpoint"
                    )
        return bytes(raw)

    def provide(self, file: HubFile, commit: str, into: Path, show_progress: Callable[[], None]) -> None:
        """Download a file unless it is there. `show_progress` is called while files are checked, which changes none of
        them. Raises ModelError if the file's hash differs from the Hub's."""

        def checked(count: int) -> None:
            self._limits.arrived(count)
            self._limits.check()
            show_progress()

        if not file.matches(into / file.path, checked):
            self._download(file, commit, into, checked)
        self._limits.completed()
        self._report.finish(file.path, file.size)

    def _download(self, file: HubFile, commit: str, into: Path, checked: Callable[[int], None]) -> None:
        """Resumes an earlier attempt."""
        part = part_of(file, into)
        url = f"{self._endpoint}/{quote(self._repository.name)}/resolve/{quote(commit)}/{quote(file.path)}"
        self._retry(lambda: self._stream(url, part, file))
        if not file.matches(part, checked):
            part.unlink(missing_ok=True)
            raise ModelError(
                f"{file.path} of {self._repository.name} is not what the Hub's hash says", field=file.path
            )
        part.replace(into / file.path)

    def _stream(self, url: str, part: Path, file: HubFile) -> None:
        """Append the response to the part. Raises ModelError if it exceeds the announced size."""
        size = file.size
        if not _may_go_on(part, size):
            part.unlink(missing_ok=True)
        have = part.stat().st_size if part.exists() else 0
        if have == size and have:
            return
        headers = {"range": f"bytes={have}-"} if have else {}
        with self._get(url, **headers) as answer:
            self._accept(answer)
            goes_on = answer.status_code == httpx.codes.PARTIAL_CONTENT
            written = have if goes_on else 0
            self._report.begin(file.path, size, written)
            with safe_files.append(part, truncate=not goes_on, mode=safe_files.SHARED) as out:
                for chunk in answer.iter_raw(CHUNK_BYTES):
                    written += len(chunk)
                    if written > size:
                        part.unlink(missing_ok=True)
                        raise ModelError(
                            f"{part.name}: more than the {size} bytes that the Hub has announced come",
                            field="source",
                        )
                    out.write(chunk)
                    self._limits.arrived(len(chunk))
                    self._report.advance(file.path, len(chunk))
                    self._limits.check()

    def _accept(self, answer: httpx.Response) -> None:
        """Raises ConfigError where the Hub refuses, HTTPError where it fails."""
        if answer.status_code in (401, 403):
            raise ConfigError(f"the Hub refuses {self._repository.name}: set HF_TOKEN", field="HF_TOKEN")
        if answer.status_code == 404:
            raise ConfigError(
                f"the Hub has no {self._repository.name}@{self._repository.revision}", field="source"
            )
        answer.raise_for_status()

    def _retry(self, call: Any) -> Any:
        failed = ""
        for attempt in range(1, TRIES + 1):
            self._limits.check(failed)
            try:
                result = call()
            except (httpx.HTTPError, httpx.InvalidURL, UnicodeError) as error:
                failed = f"; {self._endpoint}: {str(error) or type(error).__name__}"
                self._limits.check(failed)
                if attempt == TRIES and isinstance(error, httpx.ConnectError):
                    raise UnavailableError(
                        f"{self._endpoint} cannot be reached ({error}): --endpoint names a mirror, HTTPS_PROXY a proxy, "
                        "SSL_CERT_FILE the authority of either's certificate; "
                        "without a network, copy a model's directory to this machine",
                        field="endpoint",
                    ) from error
                if attempt == TRIES:
                    raise UnavailableError(f"{self._endpoint}: {error!r}", field="endpoint") from error
                self._limits.pause(PAUSE_SECONDS * attempt)
            else:
                self._limits.check()  # a truncated download may look complete
                return result
        raise AssertionError("the last attempt returns or raises")


def part_of(file: HubFile, into: Path) -> Path:
    """Return where a file is until it is complete and checked."""
    return into / f".{file.path}.part"


def _shut_down(one: socket.socket) -> None:
    with contextlib.suppress(OSError):  # already closed
        socket.socket.shutdown(one, socket.SHUT_RDWR)


def _parsed(endpoint: str) -> httpx.URL:
    """Raises ConfigError."""
    with contextlib.suppress(httpx.InvalidURL, UnicodeError):
        url = httpx.URL(endpoint)
        if url.scheme in ("http", "https") and url.host.strip("[%5B]") and 0 < (url.port or 80) < 1 << 16:
            return url
    raise ConfigError(f"--endpoint {endpoint!r} is not http://HOST or https://HOST", field="endpoint")


def _may_go_on(part: Path, size: int) -> bool:
    """Whether this user's earlier attempt left the file: another user could change a file after its hash was checked."""
    try:
        found = part.lstat()
    except FileNotFoundError:
        return False
    return stat.S_ISREG(found.st_mode) and found.st_size <= size and found.st_uid == os.geteuid()
