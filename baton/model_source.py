"""A model directory from the Hugging Face Hub: downloaded once, every file's hash checked.

The Hub provides a SHA-256 for every large file and a git hash for every small one; an existing file with the right hash
is not downloaded again. Files come in parallel, and the first error ends them all; the next attempt resumes what is
incomplete. `manifest_digest` is one hash over all files, to pin a revision's contents.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import socket
import stat
import threading
from collections.abc import Callable, Sequence
from concurrent import futures
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx

from baton import safe_files
from baton.download_limits import DownloadLimits
from baton.download_lock import one_at_a_time
from baton.download_report import DownloadReport
from cluster.addresses import is_loopback
from cluster.errors import ConfigError, ModelError, UnavailableError

# Files that engine and tokenizer read; repositories also hold other formats of the same weights.
WANTED = (".safetensors", ".json", ".jinja", ".txt", ".model")
WEIGHTS = (".safetensors",)
CHUNK_BYTES = 1 << 20

MAX_DESCRIPTION_BYTES = 32 << 20
MAX_NAME_BYTES = 200  # file systems allow 255, and a partial file has a longer name
TRIES = 4
PAUSE_SECONDS = 1.0
CONNECT_SECONDS = 10.0
FILES_AT_ONCE = 4


@dataclass(frozen=True)
class Repository:
    """`hf://ORG/NAME@REVISION`."""

    name: str
    revision: str

    @classmethod
    def parse(cls, source: str) -> Repository:
        """Raises ConfigError."""
        path, _, revision = source.removeprefix("hf://").partition("@")
        parts = path.split("/")
        if not source.startswith("hf://") or len(parts) != 2 or not all(parts):
            raise ConfigError(f"{source!r} is not hf://ORG/NAME or hf://ORG/NAME@REVISION", field="source")
        return cls(path, revision or "main")


@dataclass(frozen=True)
class HubFile:
    path: str
    size: int
    sha256: str  # empty if the Hub provides a git hash
    git_sha1: str

    def matches(self, file: Path, checked: Callable[[int], None]) -> bool:
        """Whether a file has this size and hash. A link never matches, because its target may change. `checked` gets the
        number of bytes after each read."""
        if file.is_symlink() or not file.is_file() or file.stat().st_size != self.size:
            return False
        digest = hashlib.sha256() if self.sha256 else hashlib.sha1(f"blob {self.size}\0".encode())
        with file.open("rb") as opened:
            while chunk := opened.read(CHUNK_BYTES):
                digest.update(chunk)
                checked(len(chunk))
        return digest.hexdigest() == (self.sha256 or self.git_sha1)


def manifest_digest(files: list[HubFile]) -> str:
    """SHA-256 of the sorted lines `hash  path`, which pins a revision's contents independent of the server."""
    lines = sorted(f"{one.sha256 or one.git_sha1}  {one.path}\n" for one in files)
    return hashlib.sha256("".join(lines).encode()).hexdigest()


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
            described = json.loads(raw)
            wanted = [one for one in described["siblings"] if _is_wanted(str(one["rfilename"]))]
            files = [_described(one) for one in wanted]
            if len({one.path for one in files}) < len(files):
                raise ValueError("a file is listed twice")
            commit = str(described["sha"])
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
            raise UnavailableError(
                f"{self._endpoint} does not describe {name} as the Hub does: {error!r}", field="endpoint"
            ) from error
        return commit, files

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

    def provide(self, file: HubFile, commit: str, into: Path) -> None:
        """Download a file unless it is there. Raises ModelError if its hash differs from the Hub's."""
        if not file.matches(into / file.path, self._checked):
            self._download(file, commit, into)
        self._limits.progressed()
        self._report.finish(file.path, file.size)

    def _download(self, file: HubFile, commit: str, into: Path) -> None:
        """Resumes an earlier attempt."""
        part = into / f".{file.path}.part"
        url = f"{self._endpoint}/{quote(self._repository.name)}/resolve/{quote(commit)}/{quote(file.path)}"
        self._retry(lambda: self._stream(url, part, file))
        if not file.matches(part, self._checked):
            part.unlink(missing_ok=True)
            raise ModelError(
                f"{file.path} of {self._repository.name} is not what the Hub's hash says", field=file.path
            )
        part.replace(into / file.path)

    def _checked(self, count: int) -> None:
        """Bytes of a file that is here were checked."""
        self._limits.arrived(count)
        self._limits.check()

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
                        f"{self._endpoint} cannot be reached ({error}): --endpoint names a mirror, HTTPS_PROXY a proxy; "
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


def _is_wanted(path: str) -> bool:
    return path.endswith(WANTED) and "/" not in path


def _described(one: dict[str, Any]) -> HubFile:
    large = one.get("lfs") or {}
    path, size = str(one["rfilename"]), int(large.get("size", one.get("size", 0)))
    if not path.isprintable() or len(path.encode()) > MAX_NAME_BYTES:
        raise ValueError(f"a file has the name {path[:MAX_NAME_BYTES]!r}")
    return HubFile(path, size, str(large.get("sha256", "")), str(one.get("blobId", "")))


def _may_go_on(part: Path, size: int) -> bool:
    """Whether this user's earlier attempt left the file: another user could change a file after its hash was checked."""
    try:
        found = part.lstat()
    except FileNotFoundError:
        return False
    return stat.S_ISREG(found.st_mode) and found.st_size <= size and found.st_uid == os.geteuid()


def _provide_all(
    hub: Hub,
    limits: DownloadLimits,
    files: Sequence[HubFile],
    commit: str,
    into: Path,
    done: Callable[[], None],
) -> None:
    """FILES_AT_ONCE at a time; the first error, or Ctrl-C, ends the others. `done` is called after each file."""

    def provide(file: HubFile) -> None:
        try:
            limits.check()
            hub.provide(file, commit, into)
        except BaseException as error:
            limits.stop(error)
            raise
        done()

    with futures.ThreadPoolExecutor(FILES_AT_ONCE) as pool:
        try:
            futures.wait([pool.submit(provide, file) for file in files], return_when=futures.FIRST_EXCEPTION)
            if limits.failure is not None:
                raise limits.failure
        finally:
            limits.stop()
            pool.shutdown(cancel_futures=True)


def _check_out(into: Path) -> None:
    """Raise ConfigError if the directory cannot be made. One that exists may belong to another user, and be complete."""
    if os.path.exists(into):  # not Path.exists, which raises below a directory that may not be searched
        return
    above = next(one for one in into.absolute().parents if os.path.exists(one))
    if not os.access(above, os.W_OK | os.X_OK):
        raise ConfigError(
            f"--out {into} cannot be made (no right to write in {above}): name a directory where this user may write",
            field="out",
        )


def fetch(
    source: str,
    into: Path,
    *,
    endpoint: str,
    seconds: float,
    sha256: str = "",
    weights: bool = True,
    report: DownloadReport | None = None,
) -> list[HubFile]:
    """Make `into` hold the repository's files; return all that the repository has for us.

    `seconds` is the longest time without progress. `sha256` must be their `manifest_digest`, if it is given. The token
    is HF_TOKEN of the environment. Raises what Hub raises, and OSError where the disk is full.
    """
    _check_out(into)
    limits, report = DownloadLimits(seconds), report or DownloadReport()
    hub = Hub(endpoint, Repository.parse(source), os.environ.get("HF_TOKEN", ""), limits, report)
    try:
        commit, files = hub.list_files()
        if sha256 and manifest_digest(files) != sha256:
            raise ModelError(
                f"{source} is {manifest_digest(files)}, not the {sha256} that was asked for", field="sha256"
            )
        into.mkdir(parents=True, exist_ok=True)
        wanted = [one for one in files if weights or not one.path.endswith(WEIGHTS)]
        report.expect(len(wanted), sum(one.size for one in wanted))
        with one_at_a_time(into, limits) as show_progress:
            _provide_all(hub, limits, wanted, commit, into, show_progress)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise ConfigError(f"--out {into}: {error}", field="out") from error
    finally:
        hub.close()
    return files
