"""A model's directory from the Hub: files come in parallel, the first error ends them all, and the next attempt resumes
what is incomplete."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from collections.abc import Callable, Sequence
from concurrent import futures
from pathlib import Path

from baton.download.hub import Hub, part_of
from baton.download.limits import DownloadLimits
from baton.download.listing import HubFile, Repository, manifest_digest
from baton.download.lock import one_at_a_time
from baton.download.report import DownloadReport
from cluster.errors import ConfigError, ModelError

WEIGHTS = (".safetensors",)
FILES_AT_ONCE = 4


def _provide_all(
    hub: Hub,
    limits: DownloadLimits,
    files: Sequence[HubFile],
    commit: str,
    into: Path,
    show_progress: Callable[[], None],
) -> None:
    """FILES_AT_ONCE at a time; the first error, or Ctrl-C, ends the others."""

    def provide(file: HubFile) -> None:
        try:
            limits.check()
            hub.provide(file, commit, into, show_progress)
        except BaseException as error:
            limits.stop(error)
            raise

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
    # not Path's methods, which raise below a directory that may not be searched
    nearest = next(one for one in (into.absolute(), *into.absolute().parents) if os.path.exists(one))
    if not os.path.isdir(nearest):
        raise ConfigError(f"--out {into}: {nearest} is a file; name a directory", field="out")
    if nearest == into.absolute():
        return
    if not os.access(nearest, os.W_OK | os.X_OK):
        raise ConfigError(
            f"--out {into} cannot be made (no right to write in {nearest}): name a directory where this user may write",
            field="out",
        )


def _check_room(into: Path, files: Sequence[HubFile]) -> None:
    """Raise ConfigError if the file system of `into` has no room for what is still to come."""
    missing = sum(max(0, one.size - max(_size(into / one.path), _size(part_of(one, into)))) for one in files)
    disk = shutil.disk_usage(into)
    if disk.total and missing > disk.free:  # some network file systems have no sizes
        raise _no_room(
            into, f"{missing / (1 << 30):.1f} GiB are to come and {disk.free / (1 << 30):.1f} GiB are free"
        )


def _size(path: Path) -> int:
    with contextlib.suppress(FileNotFoundError):
        return path.lstat().st_size
    return 0


def _no_room(into: Path, reason: str) -> ConfigError:
    return ConfigError(
        f"--out {into}: no room for the model there ({reason}): free some, or name a directory of a larger file system",
        field="out",
    )


def _file_error(into: Path, error: OSError) -> ConfigError:
    """The sentence for an error of the system at a file in `into`, or at `into`."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return _no_room(into, f"{error.strerror}; what has come is kept")
    at = "" if error.filename in (None, str(into)) else f" {error.filename}"
    advice = ""
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        advice = f": name a directory where this user ({os.geteuid()}) may write"
    return ConfigError(f"--out {into}:{at} {error.strerror or error}{advice}", field="out")


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
    is HF_TOKEN of the environment. Raises what Hub raises.
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
        size = sum(one.size for one in wanted)
        report.expect(len(wanted), size)
        with one_at_a_time(into, limits, report) as show_progress:
            report.expect(len(wanted), size)
            _check_room(into, wanted)
            _provide_all(hub, limits, wanted, commit, into, show_progress)
    except OSError as error:
        raise _file_error(into, error) from error
    finally:
        hub.close()
    return files
